"""POST /tokenize and /detokenize, in vLLM's shapes: what the server makes of a text, without generating."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.body import read_object
from octavo.server.errors import ApiError, json_response, refused, wrong
from octavo.server.prompts import read_messages
from octavo.server.service import Service
from octavo.server.wire import DetokenizeBody, TokenizeBody


async def tokenize(service: Service, request: Request) -> Response:
    body = TokenizeBody.parse(await read_object(request, service.settings.max_body_bytes))
    service.model_named(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: send either a prompt or messages", param="prompt", code="missing_field")
    try:
        if body.prompt is not None:
            tokens = await service.tokens.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            tokens = await service.tokens.encode_chat(read_messages(body.messages), body.chat_template_kwargs)
    except RequestError as error:
        raise refused(error) from None
    names = [service.tokens.name_of(token) for token in tokens] if body.return_token_strs else None
    return json_response(
        {"count": len(tokens), "max_model_len": service.context, "tokens": tokens, "token_strs": names}
    )


async def detokenize(service: Service, request: Request) -> Response:
    body = DetokenizeBody.parse(await read_object(request, service.settings.max_body_bytes))
    service.model_named(body.model)
    vocabulary = service.llm.engine.core.scheduler.limits.vocab_size
    for index, token in enumerate(body.tokens):
        if not 0 <= token < vocabulary:
            raise wrong(f"tokens[{index}]", token, f"token ids run from 0 to {vocabulary - 1}")
    try:
        return json_response({"prompt": await service.tokens.decode(body.tokens)})
    except RequestError as error:
        raise refused(error) from None
