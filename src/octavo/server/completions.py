"""POST /v1/completions: plain prompts, as text or token ids, one or many in a request."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.answering import Wanted, answer, require_valid_priority
from octavo.server.answers import CompletionAnswer
from octavo.server.body import read_as
from octavo.server.errors import refused
from octavo.server.generation import Asked
from octavo.server.prompts import read_prompts
from octavo.server.sampling import completion_params, names_of
from octavo.server.service import Service, new_id
from octavo.server.wire import CompletionBody

TWO_BEGINNINGS = "the prompt begins with two beginning-of-sequence tokens; send add_special_tokens=false"


async def completions(service: Service, request: Request) -> Response:
    service.lifecycle.require_open()
    (body, given), _ = await read_as(request, service.settings.max_body_bytes, _read)
    arrived_s = time.monotonic()
    model = service.model_named(body.model)
    include_usage = body.include_usage()
    require_valid_priority(body.priority)
    params = completion_params(body, has_tokenizer=service.tokens.has_tokenizer)
    prompts = await _encoded(service, body, given)
    for i, prompt in enumerate(prompts):
        service.require_fits("prompt" if len(prompts) == 1 else f"prompt[{i}]", prompt, body.max_tokens)
    echoes = (
        [item if isinstance(item, str) else await service.tokens.decode(item) for item in given] if body.echo else []
    )
    request_id = new_id("cmpl")
    warnings = {}
    if body.add_special_tokens and any(
        isinstance(item, str) and service.tokens.starts_twice(prompt)
        for item, prompt in zip(given, prompts, strict=True)
    ):
        warnings["X-Octavo-Warning"] = TWO_BEGINNINGS
    salt = service.salt(request, body.cache_salt)
    asked = Asked(request_id, prompts, params, body.priority, salt, arrived_s, dict(names_of(body)))
    wanted = Wanted(
        CompletionAnswer(
            request_id, model, service.tokens, params, prompts, echoes=echoes, with_token_ids=body.return_token_ids
        ),
        stream=body.stream,
        include_usage=include_usage,
        prompt_text=str(given[0]) if service.settings.max_log_len else "",
        headers=warnings,
    )
    return await answer(service, request, asked, wanted)


def _read(content: Mapping[str, Any]) -> tuple[CompletionBody, list[str | list[int]]]:
    body = CompletionBody.parse(content)
    return body, read_prompts(body.prompt)


async def _encoded(service: Service, body: CompletionBody, given: Sequence[str | list[int]]) -> list[list[int]]:
    prompts = []
    for item in given:
        if isinstance(item, str):
            try:
                item = await service.tokens.encode(item, add_special_tokens=body.add_special_tokens)
            except RequestError as error:
                raise refused(error, names=names_of(body)) from None
        prompts.append(item)
    return prompts
