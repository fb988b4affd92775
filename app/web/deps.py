"""What handlers may ask for by name."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from litestar.di import Provide

from app.db.database import Database
from app.db.writer import HistoryWriter
from app.engine_host import EngineHost
from app.history.recorder import Recorder
from app.realtime.hub import EventHub
from app.services.generation import GenerationService
from app.services.loads import LoadService
from app.services.priorities import Priorities
from app.services.requests import RequestReader
from app.services.session_edits import SessionEditor
from app.services.sessions import SessionReader
from app.settings import Settings
from app.web.chat_pages import ChatDesk
from app.web.openai_requests import IgnoredFields
from app.web.page_context import PageFrame


@dataclass(frozen=True, kw_only=True)
class Services:
    """The objects that live as long as the application. Each is injected under its field's name."""

    settings: Settings
    host: EngineHost
    hub: EventHub
    generations: GenerationService
    database: Database
    writer: HistoryWriter
    recorder: Recorder
    frame: PageFrame
    loads: LoadService
    priorities: Priorities
    chat_desk: ChatDesk
    sessions: SessionReader
    requests: RequestReader
    session_edits: SessionEditor
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    model_created: int = field(default_factory=lambda: int(time.time()))

    def make_dependencies(self) -> dict[str, Provide]:
        """Return the dependencies of the application."""
        return {name: Provide(_give(value), sync_to_thread=False) for name, value in vars(self).items()}


def _give(value: object) -> Callable[[], Any]:
    def give() -> Any:
        return value

    return give
