"""`GET /api/engine/state`: the engine's state as JSON, the same facts as the live page shows."""

from typing import Any

import msgspec
from litestar import Controller, MediaType, Response, get
from litestar.di import NamedDependency
from litestar.exceptions import ServiceUnavailableException
from litestar.params import FromQuery

from app.engine_host import EngineHost
from app.realtime.hub import EventHub
from app.realtime.state_json import encode_state


class EngineApiController(Controller):
    """What the engine is and does, for programs."""

    path = "/api/engine"
    tags = ("engine",)

    @get("/state", operation_id="getEngineState", summary="The engine's state after one step")
    async def get_state(
        self,
        hub: NamedDependency[EventHub],
        host: NamedDependency[EngineHost],
        blocks: FromQuery[bool] = True,  # noqa: FBT002 (a query parameter)
    ) -> Response[bytes]:
        """Return the whole state as of one step; `blocks=0` leaves the blocks out, which is far smaller."""
        if hub.has_failed:
            raise ServiceUnavailableException("The live view has failed; restart the server.")
        facts: dict[str, Any] = {
            "status": hub.status,
            "session": hub.session_id,
            "model": hub.model_name or host.model_name,
            "progress": msgspec.to_builtins(host.progress),
            "engine": msgspec.to_builtins(hub.info),
        }
        body = await encode_state(hub, facts, with_blocks=blocks)
        return Response(body, media_type=MediaType.JSON, headers={"Cache-Control": "no-store"})
