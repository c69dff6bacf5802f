"""A server in a thread of this process, around an engine without a model: what the tests of HTTP talk to.

The engine echoes the prompt over and over, so that every answer is known. Its tokenizer spells bytes,
so that characters are split over tokens, and its chats are ChatML, ended by `<|im_end|>`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
from tests.pure.worlds import VOCAB, engine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.memory.check import is_empty
from octavo.models import tokenizer as imported_before_the_first_request  # noqa: F401 - `octavo serve` does so by loading
from octavo.scheduling.core import EngineCore
from octavo.scheduling.plan import Executor, StepPlan, StepResult, TokenLogprobs
from octavo.server.async_llm import AsyncLLM
from octavo.server.running import address_of, bind, run
from octavo.server.service import Service
from octavo.server.settings import ServerSettings
from octavo.simulate.executors import EchoExecutor

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]
BOS, START, END = 256, 257, 258
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'wizard' %}{{ raise_exception('no wizards here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATIENCE_S = 20.0


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token for each byte, in the order of the byte-level alphabet, and three special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<|im_end|>")
    made.chat_template = template
    return made


class Slow(EchoExecutor):
    """Echoes with log-probabilities, one step every `step_s`; stands still while `gate` is clear."""

    def __init__(self, step_s: float = 0.0) -> None:
        super().__init__()
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False

    def collect(self) -> StepResult:
        self.gate.wait(PATIENCE_S)
        if self.broken:
            raise RuntimeError("the device at /dev/secret is gone")
        if self.step_s:
            time.sleep(self.step_s)
        return super().collect()

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        logprobs = {}
        for i, token in enumerate(result.tokens.tolist()):
            wanted = self._requests[int(plan.rows[i])].params.logprobs
            if wanted is not None and token >= 0:
                top = tuple(((token + k) % 256, -0.5 - k if k < 3 else -float("inf")) for k in range(wanted))
                logprobs[i] = TokenLogprobs(token, -0.5, 1, top)
        return StepResult(result.number, result.tokens, result.finished_s, logprobs=logprobs)


@dataclass
class Running:
    """A server that is up."""

    url: str
    client: httpx.Client
    core: EngineCore
    service: Service
    said: list[str]
    lines: list[str]
    connections: list[http.client.HTTPConnection]

    def begin(self, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
        """Send a request and read nothing of the answer."""
        opened = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=PATIENCE_S)
        self.connections.append(opened)
        opened.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return opened

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The chunks of a stream, `[DONE]` included."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as answer:
            answer.read()
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        data = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end, f"waited in vain until {what}"
            time.sleep(0.005)

    def until_empty(self) -> None:
        self.until(lambda: is_empty(self.core.scheduler.cache) and not self.core.has_work, "the pool is empty")

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def make_core(executor: Executor | None = None, **options: Any) -> EngineCore:
    return engine(executor=executor or Slow(), **({"slabs": 4000, "context": 2048, "budget": 2048} | options))


@contextmanager
def served(
    core: EngineCore | None = None,
    *,
    tokenizer: Any = "bytes",
    eos: tuple[int, ...] = (END,),
    send_buffer: int | None = None,
    sanitize: bool = True,
    **settings: Any,
) -> Iterator[Running]:
    core = core or make_core()
    found = byte_tokenizer() if tokenizer == "bytes" else tokenizer
    intake = Intake(found, defaults={}, eos_token_ids=eos, vocab_size=VOCAB, sanitize_control_tokens=sanitize)
    built = Engine(core, intake)
    built.model_name = "echo"
    with served_engine(built, send_buffer=send_buffer, **settings) as running:
        yield running


@contextmanager
def served_engine(built: Engine, *, send_buffer: int | None = None, **settings: Any) -> Iterator[Running]:
    core = built.core
    asked = ServerSettings(port=0, **settings)
    service = Service(AsyncLLM(built), asked)
    bound = bind(asked)
    if send_buffer is not None:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
    said: list[str] = []
    lines: list[str] = []
    service.log._write = lines.append
    ready = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        ready.set()

    loop = asyncio.new_event_loop()
    tasks: list[asyncio.Task[int]] = []

    def serve() -> None:
        asyncio.set_event_loop(loop)
        tasks.append(loop.create_task(run(service, bound, say)))
        try:
            loop.run_until_complete(tasks[0])
        except asyncio.CancelledError:
            pass
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    url = address_of(bound)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S), "the server did not say that it is ready"
        with httpx.Client(base_url=url, timeout=PATIENCE_S, verify=False) as client:
            running = Running(url, client, core, service, said, lines, [])
            try:
                yield running
            finally:
                for connection in running.connections:
                    connection.close()
    finally:
        executor = core.executor
        if isinstance(executor, Slow):
            executor.gate.set()
        if thread.is_alive():
            loop.call_soon_threadsafe(tasks[0].cancel)
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the server did not end"
