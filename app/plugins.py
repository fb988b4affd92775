"""The application's one plugin: it builds the long-lived objects and assembles everything."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
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
from app.history.crash_repair import repair_after_crash
from app.history.metric_log import MetricLog
from app.history.recorder import Recorder, TextSwitch
from app.history.request_log import RequestLog
from app.history.retention import Retention
from app.history.step_log import StepLog
from app.realtime.hub import EventHub
from app.services.chat_answers import Engine
from app.services.chat_store import ChatStore
from app.services.chat_trace import ChatTraces
from app.services.chats import ChatService
from app.services.generation import GenerationService
from app.services.key_limits import KeyLimits
from app.services.loads import LoadService
from app.services.priorities import Priorities
from app.services.requests import RequestReader
from app.services.session_edits import SessionEditor
from app.services.sessions import SessionReader
from app.settings import Settings
from app.version import package_version
from app.web.chat_pages import ChatController, ChatDesk
from app.web.decision_pages import DecisionPagesController
from app.web.deps import Services
from app.web.engine_api import EngineApiController
from app.web.engine_policy import EnginePolicyController
from app.web.health import HealthController
from app.web.load_pages import LoadPagesController
from app.web.markdown import MarkdownRenderer
from app.web.openai_api import MAX_BODY_BYTES, OpenAIController
from app.web.page_context import PageFrame
from app.web.pages import PagesController
from app.web.recording import RecordingController
from app.web.request_pages import RequestPagesController
from app.web.requests_api import MetricsApiController, RequestsApiController
from app.web.session_pages import SessionPagesController
from app.web.sessions_api import SessionsApiController
from app.web.streams import engine_socket
from app.web.templating import make_static_router, make_template_config
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
        self.retention = Retention(self.database, self.writer, self.hub.session_id, settings.history_size)
        self.recorder = Recorder(
            self.hub.session_id, self.writer, TextSwitch(is_on=settings.record_text == "on")
        )
        self.writer.add_on_open(partial(repair_after_crash, session_id=self.hub.session_id))
        self.recorder.add_part(StepLog(self.hub.session_id, self.writer, self.recorder.text))
        requests = RequestLog(self.hub.session_id, self.writer, self.recorder.text)
        self.recorder.add_part(requests)
        self.recorder.add_part(MetricLog(self.hub.session_id, self.writer))
        self.hub.forward_records(self.recorder.on_record)
        self.host = EngineHost(
            load,
            settings.model_name,
            HostEvents(self.hub.publish, self._open_hub, self._tell_status, requests.interrupt),
        )
        sessions = SessionReader(self.database)
        limits = KeyLimits(settings.max_concurrency_per_key)
        generations = GenerationService(self.host, requests, limits)
        priorities = Priorities(settings.priority_class)
        self._frame = frame = PageFrame(settings, self.host, self.writer, self.recorder)
        self.chats = self._make_chats(generations, priorities)
        self.loads = LoadService(self.host, generations, priorities)
        self._services = Services(
            settings=settings,
            host=self.host,
            hub=self.hub,
            generations=generations,
            database=self.database,
            writer=self.writer,
            recorder=self.recorder,
            frame=frame,
            loads=self.loads,
            priorities=priorities,
            chat_desk=ChatDesk(self.chats, MarkdownRenderer(), frame),
            sessions=sessions,
            requests=RequestReader(self.database, sessions, self.host, self.hub.session_id, requests),
            session_edits=SessionEditor(sessions, self.database, self.writer, self.hub.session_id),
        )

    def _make_chats(self, generations: GenerationService, priorities: Priorities) -> ChatService:
        traces = ChatTraces()
        self.recorder.add_part(traces)
        return ChatService(
            Engine(self.host, generations, traces, priorities),
            ChatStore(self.database, self.writer),
            self.hub.session_id,
            is_text_kept=lambda: self.recorder.text.is_on,
        )

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Register handlers, dependencies and the engine's life."""
        app_config.route_handlers.extend(
            [
                OpenAIController,
                HealthController,
                EngineApiController,
                EnginePolicyController,
                PagesController,
                RecordingController,
                LoadPagesController,
                ChatController,
                SessionsApiController,
                RequestsApiController,
                MetricsApiController,
                RequestPagesController,
                SessionPagesController,
                DecisionPagesController,
                engine_socket,
                make_static_router(),
            ]
        )
        app_config.dependencies.update(self._services.make_dependencies())
        app_config.exception_handlers[Exception] = self._answer_exception
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
        self.retention.start()
        self.host.start()
        try:
            yield
        finally:
            self.hub.close()
            await self.loads.close()
            await self.host.stop()
            await self.chats.stop()
            self.recorder.close()
            await self.retention.stop()
            await self.writer.stop(HISTORY_TIMEOUT_S)

    def _open_hub(self, config: EngineConfig) -> None:
        self.hub.open(config, self.host.model_name, info=self.host.info)
        self.recorder.open(config, self.host.model_name, info=self.host.info)

    def _tell_status(self) -> None:
        self.hub.set_status(self.host.status.value)

    def _answer_exception(self, request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
        """Show people a page and programs a body."""
        response = handle_exception(request, error)
        if not _is_for_people(request):
            return response
        info = describe_error(error)
        page: Template = self._frame.render_error(request, info.status, info.message)
        page.headers.update(info.headers)
        return page


def _is_for_people(request: Request[Any, Any, Any]) -> bool:
    path = request.scope["path"]
    if any(path == prefix or path.startswith(f"{prefix}/") for prefix in PROGRAM_PATHS):
        return False
    return "text/html" in request.headers.get("accept", "")
