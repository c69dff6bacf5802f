"""/v1/cache: what is kept for reuse is forgotten, or pinned for a while. Between two steps.

A reset answers what it freed at once: blocks that running sequences hold stay theirs, and are found by nobody
afterwards. Needs a key where the server has any; whoever has one resets for all. Pins belong to their salt: where keys
are isolated nobody sees, or ends, those of another key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineDeadError, RequestError, shorten
from octavo.server.body import read_as
from octavo.server.engine_thread import LivePin
from octavo.server.errors import CONTEXT, ApiError, engine_dead, json_response, refused, wrong
from octavo.server.prompts import read_messages, read_prompts
from octavo.server.service import Service
from octavo.server.wire import PinBody, ResetBody, UnpinBody


async def reset(service: Service, request: Request) -> Response:
    await read_as(request, service.settings.max_body_bytes, ResetBody.parse)
    groups = service.llm.engine.core.scheduler.cache.layout.groups
    try:
        freed = await service.llm.reset_prefix_cache()
    except EngineDeadError as error:
        raise engine_dead(error) from None
    return json_response(
        {
            "object": "cache.reset",
            "reuse": service.llm.engine.core.scheduler.policies.reuse.name,
            "freed_blocks": {group.name: blocks for group, blocks in zip(groups, freed, strict=True)},
            "freed_bytes": sum(group.block_bytes * blocks for group, blocks in zip(groups, freed, strict=True)),
        }
    )


async def pin(service: Service, request: Request) -> Response:
    (body, given), size = await read_as(request, service.settings.max_body_bytes, _to_pin)
    service.model_named(body.model)
    salt = service.salt(request, body.cache_salt)
    try:
        prompt = await _encoded(service, body, given, size)
        if len(prompt) > service.context:
            name = "messages" if body.prompt is None else "prompt"
            remedy = f"the context holds {service.context}, so that no more can be kept; send the start that is shared"
            raise wrong(name, f"{len(prompt)} tokens", remedy, code=CONTEXT)
        made = await service.llm.pin_prefix({"prompt_token_ids": prompt}, body.ttl, salt or None)
    except RequestError as error:
        raise refused(error, names={"prompt_token_ids": "prompt"}) from None
    except EngineDeadError as error:
        raise engine_dead(error) from None
    return json_response({"object": "cache.pin"} | _shown(made))


async def unpin(service: Service, request: Request) -> Response:
    body, _ = await read_as(request, service.settings.max_body_bytes, UnpinBody.parse)
    try:
        found = await service.llm.unpin_prefix(body.id, owner=service.salt(request, None))
    except EngineDeadError as error:
        raise engine_dead(error) from None
    if not found:
        raise ApiError(404, f"id={shorten(body.id)}: is no pin, or no longer; /v1/cache/pins lists yours",
                       param="id", code="pin_not_found")  # fmt: skip
    return json_response({"object": "cache.unpin", "id": body.id})


async def pins(service: Service, request: Request) -> Response:
    try:
        found = await service.llm.live_pins(owner=service.salt(request, None))
    except EngineDeadError as error:
        raise engine_dead(error) from None
    return json_response({"object": "list", "data": [_shown(one) for one in found]})


def _shown(one: LivePin) -> dict[str, Any]:
    return {"id": one.name, "tokens": one.tokens, "expires_in": one.expires_in}


Messages = list[dict[str, Any]]


def _to_pin(content: Mapping[str, Any]) -> tuple[PinBody, Messages | list[str | list[int]]]:
    body = PinBody.parse(content)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt: send either a prompt or messages", param="prompt", code="missing_field")
    if body.messages is not None:
        return body, read_messages(body.messages)
    given = read_prompts(body.prompt)
    if len(given) > 1:
        raise wrong("prompt", f"{len(given)} prompts", "send one; each gets a pin of its own")
    return body, given


async def _encoded(service: Service, body: PinBody, given: Any, size: int) -> list[int]:
    if body.messages is not None:
        service.require_few(given)
        return await service.tokens.encode_chat(given, body.chat_template_kwargs, size)
    if isinstance(given[0], str):
        return await service.tokens.encode(given[0], add_special_tokens=body.add_special_tokens)
    ids: list[int] = given[0]
    return ids
