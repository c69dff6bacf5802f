"""`Service`: what the endpoints share. The engine, its tokenizer, the queue's bounds, the state of the server.

Owns the wiring of event folds and the name of the model. Knows no route.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Sequence

from starlette.requests import Request

from octavo.engine.intake import salt_of
from octavo.errors import RequestError, shorten
from octavo.observe.metrics import Metrics
from octavo.scheduling.events import Event, RefusalReason, Refused
from octavo.scheduling.request import SamplingParams
from octavo.server.async_llm import AsyncLLM
from octavo.server.errors import CONTEXT, ApiError, refused, wrong
from octavo.server.lifecycle import Lifecycle
from octavo.server.limits import WaitingRoom
from octavo.server.request_log import RequestLog
from octavo.server.settings import ServerSettings
from octavo.server.tokens import Tokens

QUEUE_FULL = 429
REFUSALS = (400, 404, 413, 415, QUEUE_FULL)
"""What a client may do something about. Where the server is gone, nothing was refused."""


class Service:
    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.created = int(time.time())
        own_name = llm.engine.model_name or "model"
        self.model_names = settings.served_model_names or (own_name,)
        self.metrics = Metrics(llm.engine.core, self.model_names[0])
        self.tokens = Tokens(llm.engine.intake, template=settings.chat_template)
        self.lifecycle = Lifecycle(lambda: llm.is_alive)
        self.room = WaitingRoom(settings.queue)
        self.log = RequestLog(enabled=settings.enable_log_requests, max_prompt_chars=settings.max_log_len)
        scheduler = llm.engine.core.scheduler
        limits = scheduler.limits
        self.context = limits.max_model_len
        self.cut_to_pool = limits.context_tokens is not None and limits.max_model_len < limits.context_tokens
        """The model could go on where the KV cache ends."""
        self.pool_tokens = scheduler.cache.max_tokens_per_sequence()

    async def start(self) -> None:
        """Start the engine and let it generate one token: from then on the server can really answer."""
        prompt = {"prompt_token_ids": [1 if self.llm.engine.core.scheduler.limits.vocab_size > 1 else 0]}
        async for delta in self.llm.stream(prompt, SamplingParams(max_tokens=1, seed=0, temperature=0.0)):
            if delta.error is not None:
                raise RuntimeError(f"the first step failed: {delta.error}")
        # What people see starts at zero: the folds begin after the trial.
        self.llm.observers += [self.room.observe, self.metrics.observe]
        self.lifecycle.now_ready()

    async def stop(self) -> None:
        await self.llm.shutdown()
        self.tokens.close()
        self.log.close()

    def turned_away(self, error: ApiError) -> None:
        """Count a generation that was refused before it reached the engine."""
        if error.counted or error.status not in REFUSALS:
            return
        reason: RefusalReason = "queue_full" if error.status == QUEUE_FULL else "invalid"
        events: list[Event] = [Refused(time.monotonic(), "", reason)]
        for observer in self.llm.observers:
            observer(events)

    def model_named(self, name: str | None) -> str:
        """The name to answer with. Raises `ApiError` (404) for a model that is not here."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        raise ApiError(404, f"model={shorten(name)}: is not served here; use {' or '.join(self.model_names)}",
                       param="model", code="model_not_found")  # fmt: skip

    def salt(self, request: Request, given: str | None) -> str:
        """The `cache_salt` of a request. Where keys are isolated, its key goes in, which no other caller has."""
        try:
            asked = salt_of(given)
        except RequestError as error:
            raise refused(error) from None
        if not self.settings.isolate_api_keys:
            return asked
        key = request.headers.get("authorization", "").partition(" ")[2].strip()
        # Both of one length, so that neither runs into the other, and the result is never too long to be a salt.
        return hashlib.sha256(key.encode()).hexdigest() + (hashlib.sha256(asked.encode()).hexdigest() if asked else "")

    def require_fits(self, param: str, prompt: Sequence[int], max_tokens: int | None) -> None:
        """Raises `ApiError` for a prompt that leaves no room for an answer."""
        most = min(self.context, self.pool_tokens + 1)
        if len(prompt) < most or (max_tokens == 0 and len(prompt) <= self.context):
            return
        why = (
            f"the context holds {self.context}"
            if most == self.context and not self.cut_to_pool
            else f"the KV cache holds {self.pool_tokens} (--kv-cache-memory-bytes asks for a larger one)"
        )
        raise ApiError(400, f"{param}={len(prompt)} tokens: too long, {why}; send at most {most - 1}, "
                            "so that there is room for an answer", param=param, code=CONTEXT)  # fmt: skip

    def require_few(self, messages: Sequence[object]) -> None:
        """Raises `ApiError` for more messages than the context has tokens, before a template works on them."""
        if len(messages) > self.context:
            remedy = f"too many, the context holds {self.context} tokens; send fewer"
            raise wrong("messages", f"{len(messages)} messages", remedy, code=CONTEXT)


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
