"""The application's one plugin: it builds the long-lived objects and assembles everything."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from litestar import Litestar, Request, Response
from litestar.config.app import AppConfig
from litestar.plugins import InitPlugin
from litestar.response import Template

from app.db.database import DATABASE_FILE, Database
from app.db.writer import HistoryWriter
from app.engine_host import EngineHost, HostEvents
from app.engine_thread import Load
from app.errors import describe_error, handle_exception
from app.history.recorder import Recorder, TextSwitch
from app.realtime.hub import EventHub
from app.services.generation import GenerationService
from app.settings import Settings
from app.version import package_version
from app.web.deps import Services
from app.web.engine_api import EngineApiController
from app.web.health import HealthController
from app.web.openai_api import MAX_BODY_BYTES, OpenAIController
from app.web.page_context import PageFrame
from app.web.pages import PagesController
from app.web.streams import engine_socket
from app.web.templating import make_static_router, make_template_config, render_error_page
from engine.config import EngineConfig

HISTORY_TIMEOUT_S = 5.0
"""How long stopping waits for what is still to be written."""

PROGRAM_PATHS = ("/v1", "/api", "/health", "/static")
"""Below these, errors are for programs even if a browser asks."""


class ApplicationPlugin(InitPlugin):
    """Builds hub and host for one server run; `host` and `hub` are for whoever runs the server."""

    def __init__(self, settings: Settings, load: Load) -> None:
        """Nothing runs before the application starts."""
        self._settings = settings
        self.hub = EventHub(session_id=uuid4().hex)
        self.database = Database(settings.data_dir / DATABASE_FILE)
        self.writer = HistoryWriter(self.database)
        self.recorder = Recorder(
            self.hub.session_id, self.writer, TextSwitch(is_on=settings.record_text == "on")
        )
        self.hub.forward_records(self.recorder.on_record)
        self.host = EngineHost(
            load, settings.model_name, HostEvents(self.hub.publish, self._open_hub, self._tell_status)
        )
        self._services = Services(
            settings=settings,
            host=self.host,
            hub=self.hub,
            generations=GenerationService(self.host),
            database=self.database,
            writer=self.writer,
            recorder=self.recorder,
            frame=PageFrame(settings, self.host, self.writer, self.recorder),
        )

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Register handlers, dependencies and the engine's life."""
        app_config.route_handlers.extend(
            [
                OpenAIController,
                HealthController,
                EngineApiController,
                PagesController,
                engine_socket,
                make_static_router(),
            ]
        )
        app_config.dependencies.update(self._services.make_dependencies())
        app_config.exception_handlers[Exception] = _answer_exception
        app_config.lifespan.append(self._run_engine)
        app_config.template_config = make_template_config()
        app_config.request_max_body_size = MAX_BODY_BYTES
        app_config.openapi_config = None  # its page loads scripts from elsewhere
        app_config.logging_config = None  # app.telemetry sets logging up
        return app_config

    @asynccontextmanager
    async def _run_engine(self, _: Litestar) -> AsyncIterator[None]:
        self.recorder.start(self._settings.model_name, package_version())
        self.writer.start()
        self.host.start()
        try:
            yield
        finally:
            self.hub.close()
            await self.host.stop()
            self.recorder.close()
            await self.writer.stop(HISTORY_TIMEOUT_S)

    def _open_hub(self, config: EngineConfig) -> None:
        self.hub.open(config, self.host.model_name)
        self.recorder.open(config, self.host.model_name)

    def _tell_status(self) -> None:
        self.hub.set_status(self.host.status.value)


def _answer_exception(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """Show people a page and programs a body."""
    response = handle_exception(request, error)
    if not _is_for_people(request):
        return response
    info = describe_error(error)
    page: Template = render_error_page(request, info.status, info.message)
    page.headers.update(info.headers)
    return page


def _is_for_people(request: Request[Any, Any, Any]) -> bool:
    path = request.scope["path"]
    if any(path == prefix or path.startswith(f"{prefix}/") for prefix in PROGRAM_PATHS):
        return False
    return "text/html" in request.headers.get("accept", "")
