"""Health for machines: is it alive, may it get work. Nothing here asks the model for anything."""

from typing import Any

import msgspec
from litestar import Controller, Response, get
from litestar.di import NamedDependency

from app.engine_host import HEARTBEAT_LIMIT_S, EngineHost, HostStatus
from app.web.openai_requests import IgnoredFields


class HealthController(Controller):
    """Liveness, readiness and a summary."""

    path = "/health"
    tags = ("health",)

    @get("/live", operation_id="getLiveness", summary="200 while event loop and engine thread turn")
    async def get_liveness(self, host: NamedDependency[EngineHost]) -> Response[dict[str, Any]]:
        """Tell whether a restart would help: 503 when the engine is dead or stuck, 200 while it loads."""
        alive = host.is_responsive
        return _answer({"live": alive, "reason": None if alive else _why_stuck(host)}, is_good=alive)

    @get("/ready", operation_id="getReadiness", summary="200 when requests are taken")
    async def get_readiness(self, host: NamedDependency[EngineHost]) -> Response[dict[str, Any]]:
        """Tell whether requests may be sent: 503 with the reason and the progress of loading."""
        ready = _is_ready(host)
        facts = {"ready": ready, "reason": None if ready else _why_not_ready(host)}
        return _answer({**facts, "progress": msgspec.to_builtins(host.progress)}, is_good=ready)

    @get("/", operation_id="getHealth", summary="All of it at a glance")
    async def get_health(
        self, host: NamedDependency[EngineHost], ignored_fields: NamedDependency[IgnoredFields]
    ) -> Response[dict[str, Any]]:
        """Return status, model, age of the engine's heartbeat and what clients asked for in vain."""
        facts = {
            "status": host.status,
            "ready": _is_ready(host),
            "live": host.is_responsive,
            "model": host.model_name,
            "error": host.error,
            "progress": msgspec.to_builtins(host.progress),
            "engine": msgspec.to_builtins(host.info),
            "load_seconds": host.load_seconds,
            "heartbeat_age_s": round(host.heartbeat_age_s, 3),
            "num_open_requests": host.num_open,
            "ignored_fields": dict(ignored_fields.counts),
        }
        return _answer(facts, is_good=True)


def _is_ready(host: EngineHost) -> bool:
    return host.status is HostStatus.READY and host.is_responsive


def _why_stuck(host: EngineHost) -> str:
    if host.status is HostStatus.FAILED:
        return f"the engine has failed: {host.error}"
    return f"the engine has not finished a step for {HEARTBEAT_LIMIT_S:g} s"


def _why_not_ready(host: EngineHost) -> str:
    if host.status in {HostStatus.LOADING, HostStatus.DRAINING}:
        return str(host.status)
    return _why_stuck(host)


def _answer(facts: dict[str, Any], *, is_good: bool) -> Response[dict[str, Any]]:
    headers = {"cache-control": "no-store"}
    if not is_good:
        headers["retry-after"] = "1"
    return Response(
        facts, status_code=200 if is_good else 503, media_type="application/json", headers=headers
    )
