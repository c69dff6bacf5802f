"""POST /tokenize and /detokenize, in vLLM's shapes: what the server makes of a text, without generating."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.body import read_as
from octavo.server.errors import ApiError, json_response, refused, wrong
from octavo.server.prompts import read_messages
from octavo.server.service import Service
from octavo.server.wire import DetokenizeBody, TokenizeBody


async def tokenize(service: Service, request: Request) -> Response:
    (body, messages), size = await read_as(request, service.settings.max_body_bytes, _to_tokenize)
    service.model_named(body.model)
    try:
        if body.prompt is not None:
            tokens = await service.tokens.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            tokens = await service.tokens.encode_chat(messages, body.chat_template_kwargs, size)
    except RequestError as error:
        raise refused(error) from None

    def told() -> Response:
        names = [service.tokens.name_of(token) for token in tokens] if body.return_token_strs else None
        count = len(tokens)
        return json_response({"count": count, "max_model_len": service.context, "tokens": tokens, "token_strs": names})

    return await service.tokens.run(told, len(tokens))


async def detokenize(service: Service, request: Request) -> Response:
    vocabulary = service.llm.engine.core.scheduler.limits.vocab_size

    def checked(content: Mapping[str, Any]) -> DetokenizeBody:
        body = DetokenizeBody.parse(content)
        for index, token in enumerate(body.tokens):
            if not 0 <= token < vocabulary:
                raise wrong(f"tokens[{index}]", token, f"token ids run from 0 to {vocabulary - 1}")
        return body

    body, _ = await read_as(request, service.settings.max_body_bytes, checked)
    service.model_named(body.model)
    try:
        return json_response({"prompt": await service.tokens.decode(body.tokens)})
    except RequestError as error:
        raise refused(error) from None


def _to_tokenize(content: Mapping[str, Any]) -> tuple[TokenizeBody, list[dict[str, Any]]]:
    body = TokenizeBody.parse(content)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: send either a prompt or messages", param="prompt", code="missing_field")
    return body, read_messages(body.messages) if body.messages is not None else []
