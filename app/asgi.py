"""The application factory."""

from functools import partial

from litestar import Litestar

from app.engine_loading import load_engine
from app.engine_thread import Load
from app.errors import render_refusal
from app.plugins import ApplicationPlugin
from app.request_labels import RequestLabels
from app.request_lines import RequestLines
from app.security import AccessPolicy, SecurityGuard
from app.settings import Settings


def create_app(settings: Settings, load: Load | None = None) -> Litestar:
    """Return the application; starting it starts the engine thread.

    `load` builds the engine, by default the model that the settings name.
    """
    plugin = ApplicationPlugin(settings, load or partial(load_engine, settings))
    app = Litestar(plugins=[plugin])
    # Around everything, so that unknown paths, static files and sockets are guarded as well.
    policy = AccessPolicy(settings.host, settings.allowed_host)
    guarded = SecurityGuard(app.asgi_handler, policy, render_refusal)
    app.asgi_handler = RequestLines(RequestLabels(guarded))
    return app
