"""`/api/engine/policy`: by which policies the scheduler decides, read and changed while it runs."""

import logging
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from litestar import Controller, MediaType, Request, Response, get, post
from litestar.di import NamedDependency
from litestar.exceptions import ServiceUnavailableException
from litestar.response import Redirect

from app.engine_host import EngineHost
from app.realtime.hub import EventHub
from app.services.priorities import Priorities
from app.web.form_data import find_way_back, read_form
from app.web.openai_requests import read_json
from app.web.page_context import HOME, PAGE_HEADERS
from engine.config import PREEMPTION_MODES, EngineConfig
from engine.errors import ConfigError, RequestError
from engine.records import Policies
from engine.scheduling.preemption import PREEMPTION_POLICIES
from engine.scheduling.queue import QUEUE_POLICIES

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 16 * 1024
FIELDS: Final = ("policy", "preemption", "preemption_mode")
BACK_FIELD: Final = "back"
"""In the form of a page without scripts: where to lead to."""

_FORM_TYPES: Final = ("application/x-www-form-urlencoded", "multipart/form-data")
_NO_STORE: Final = {"Cache-Control": "no-store"}

AnyRequest = Request[Any, Any, Any]


class EnginePolicyController(Controller):
    """The policies in force, and others."""

    path = "/api/engine/policy"
    tags = ("engine",)

    @get("/", operation_id="getPolicies", summary="The policies in force, and those that there are")
    async def show(
        self,
        host: NamedDependency[EngineHost],
        hub: NamedDependency[EventHub],
        priorities: NamedDependency[Priorities],
    ) -> Response[bytes]:
        """Return what the newest step was decided by."""
        if hub.has_failed:
            raise ServiceUnavailableException("The live view has failed; restart the server.")
        config, snapshot = host.config, hub.snapshot
        if config is None or snapshot is None:
            host.check_available()
        assert config is not None  # noqa: S101 - an available engine has a configuration
        assert snapshot is not None  # noqa: S101 - the hub is opened with it
        return _answer(snapshot.policies, snapshot.step, config, priorities)

    @post(
        "/",
        status_code=200,
        operation_id="setPolicies",
        summary="Decide by other policies",
        request_max_body_size=MAX_BODY_BYTES,
    )
    async def change(
        self,
        request: AnyRequest,
        host: NamedDependency[EngineHost],
        priorities: NamedDependency[Priorities],
    ) -> Response[bytes] | Redirect:
        """Change the policies that are named; returns those in force once the record that says so is there.

        Takes JSON or a form with the same names; leads a form without scripts back to its page.
        """
        is_form = request.headers.get("content-type", "").lower().startswith(_FORM_TYPES)
        back: object = None
        if is_form:
            fields = {name: value for name, value in (await read_form(request)).items() if value != ""}
            back = fields.pop(BACK_FIELD, None)
        else:
            fields = _decode(await read_json(request))
        host.check_available()
        has_page = is_form and "text/html" in request.headers.get("accept", "") and not _is_htmx(request)
        if has_page and not fields:
            return _lead_back(back)  # every choice was left as it is
        config = host.config
        assert config is not None  # noqa: S101 - an available engine has a configuration
        changes = _check(fields, config)
        try:
            applied = await host.set_policies(changes)
        except ConfigError as error:
            raise RequestError(str(error), code="invalid_value") from None
        logger.info("From step %d on the engine decides by %s", applied.step, applied.policies)
        if has_page:
            return _lead_back(back)
        return _answer(applied.policies, applied.step, config, priorities)


def _lead_back(back: object) -> Redirect:
    return Redirect(find_way_back(back, HOME), status_code=303, headers=dict(PAGE_HEADERS))


def _is_htmx(request: AnyRequest) -> bool:
    return "hx-request" in request.headers


def list_allowed(config: EngineConfig) -> dict[str, tuple[str, ...]]:
    """Return the names that each field may have; without a host tier there is nothing to swap to."""
    modes = PREEMPTION_MODES if config.num_host_blocks else tuple(m for m in PREEMPTION_MODES if m != "swap")
    return {"policy": QUEUE_POLICIES, "preemption": PREEMPTION_POLICIES, "preemption_mode": modes}


def _answer(policies: Policies, step: int, config: EngineConfig, priorities: Priorities) -> Response[bytes]:
    body = {
        "step": step,
        **{name: getattr(policies, name) for name in FIELDS},
        "allowed": list_allowed(config),
        "priority_classes": priorities.describe(),
        "priority_ageing_s": config.priority_ageing_s,
    }
    return Response(msgspec.json.encode(body), media_type=MediaType.JSON, headers=_NO_STORE)


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise RequestError(f"The body is not a JSON object: {error}.", code="invalid_json") from None


def _check(fields: Mapping[str, object], config: EngineConfig) -> dict[str, str]:
    """Return the changes; raises `RequestError` that names the first field at fault and what is allowed."""
    for name in fields:
        if name not in FIELDS:
            raise RequestError(
                f"{name[:40]!r} is no field; there are {', '.join(FIELDS)}.",
                param=name[:40],
                code="unknown_field",
            )
    if not fields:
        raise RequestError(f"Nothing is to be changed; give {' or '.join(FIELDS)}.", code="invalid_value")
    changes: dict[str, str] = {}
    for name, allowed in list_allowed(config).items():
        if name not in fields:
            continue
        value = fields[name]
        if not isinstance(value, str) or value not in allowed:
            hint = "; swap needs --swap-memory" if value == "swap" else ""
            raise RequestError(
                f"{name} is {str(value)[:40]!r}; allowed: {', '.join(allowed)}{hint}.",
                param=name,
                code="invalid_value",
            )
        changes[name] = value
    return changes
