"""POST /v1/cache/reset: what is kept for reuse is forgotten, between two steps.

Answers what that freed at once. Blocks that running sequences hold stay theirs, and are found by nobody afterwards.
Needs a key where the server has any; whoever has one resets for all.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import EngineDeadError
from octavo.server.body import read_object
from octavo.server.errors import engine_dead, json_response
from octavo.server.service import Service
from octavo.server.wire import ResetBody


async def reset(service: Service, request: Request) -> Response:
    ResetBody.parse(await read_object(request, service.settings.max_body_bytes))
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
