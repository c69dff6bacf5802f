"""POST /v1/chat/completions: messages through the model's chat template."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.answering import Wanted, answer, require_valid_priority
from octavo.server.answers import ChatAnswer
from octavo.server.body import read_as
from octavo.server.errors import refused
from octavo.server.generation import Asked
from octavo.server.prompts import read_messages
from octavo.server.sampling import chat_params, names_of
from octavo.server.service import Service, new_id
from octavo.server.wire import ChatBody


async def chat_completions(service: Service, request: Request) -> Response:
    service.lifecycle.require_open()
    (body, messages), size = await read_as(request, service.settings.max_body_bytes, _read)
    arrived_s = time.monotonic()
    model = service.model_named(body.model)
    include_usage = body.include_usage()
    require_valid_priority(body.priority)
    service.require_few(messages)
    params = chat_params(body, has_tokenizer=service.tokens.has_tokenizer)
    try:
        prompt = await service.tokens.encode_chat(messages, body.chat_template_kwargs, size)
    except RequestError as error:
        raise refused(error, names=names_of(body)) from None
    service.require_fits("messages", prompt, params.max_tokens)
    request_id = new_id("chatcmpl")
    salt = service.salt(request, body.cache_salt)
    asked = Asked(request_id, [prompt], params, body.priority, salt, arrived_s, dict(names_of(body)))
    wanted = Wanted(
        ChatAnswer(request_id, model, service.tokens, params, [prompt], with_token_ids=body.return_token_ids),
        stream=body.stream,
        include_usage=include_usage,
        prompt_text=messages[-1]["content"],
        headers={},
    )
    return await answer(service, request, asked, wanted)


def _read(content: Mapping[str, Any]) -> tuple[ChatBody, list[dict[str, Any]]]:
    body = ChatBody.parse(content)
    return body, read_messages(body.messages)
