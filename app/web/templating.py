"""Templates and static files: one Jinja environment, and asset addresses that name their content.

All static files are served below `/static/<hash of all of them>/`, so that modules can import each other by
relative path, browsers may keep everything for ever, and a new version is never mixed with an old one.
"""

import errno
import hashlib
from functools import cache
from http import HTTPStatus
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Request, Router
from litestar.datastructures import CacheControlHeader
from litestar.file_system import BaseLocalFileSystem
from litestar.plugins.jinja import JinjaTemplateEngine
from litestar.response import Template
from litestar.static_files import create_static_files_router
from litestar.template import TemplateConfig
from litestar.types import PathType
from litestar.types.file_types import FileInfo

from app.resources import resource_dir
from app.web.moments import to_rfc3339, to_words

CACHE_SECONDS: Final = 365 * 24 * 3600
HASH_CHARS: Final = 16
NO_VALUE: Final = "\u2013"
"""Stands where a number would, when there is none."""

THEME_COOKIE: Final = "pageglass_theme"
THEMES: Final = ("dark", "light", "system")

_NO_FILE_NAME: Final = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EILSEQ}
"""What a file system says of names that no file of it can have."""

_NOTHING_HERE: Final = "The address leads nowhere; perhaps it was mistyped."
_ERROR_TITLES: Final = {
    400: "That request makes no sense to us",
    403: "Not allowed",
    404: "There is no such page",
    405: "That does not work here",
    500: "Something went wrong in the server",
    503: "Not available right now",
}


@cache
def assets_version() -> str:
    """Return a hash of the names and contents of all static files."""
    root = resource_dir("static")
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:HASH_CHARS]


def asset_url(path: str) -> str:
    """Return the address of a static file, such as `css/app.css`; `FileNotFoundError` if there is none."""
    if not (resource_dir("static") / path).is_file():
        raise FileNotFoundError(f"there is no static file {path!r}")
    return f"/static/{assets_version()}/{path}"


class StaticFileSystem(BaseLocalFileSystem):
    """The local files; what cannot be the name of a file is one that is not there."""

    async def info(self, path: PathType, **kwargs: Any) -> FileInfo:
        """Describe a file; `FileNotFoundError` also for names that the system refuses to look up."""
        try:
            return await super().info(path, **kwargs)
        except ValueError as error:  # a zero byte
            raise FileNotFoundError(str(path)) from error
        except OSError as error:
            if error.errno not in _NO_FILE_NAME:
                raise
            raise FileNotFoundError(str(path)) from error


def make_static_router() -> Router:
    """Serve the static files under their hash, cacheable for ever."""
    return create_static_files_router(
        path=f"/static/{assets_version()}",
        directories=[resource_dir("static")],
        file_system=StaticFileSystem(),
        cache_control=CacheControlHeader(public=True, max_age=CACHE_SECONDS, immutable=True),
        name="static",
    )


def format_count(value: float) -> str:
    """Return a number with thousands separators."""
    return f"{value:,.0f}"


def format_percent(part: float, whole: float) -> str:
    """Return part / whole as a percentage without decimals; a dash when there is no whole."""
    return f"{100 * part / whole:.0f}%" if whole else NO_VALUE


def make_environment() -> Environment:
    """Return the Jinja environment: escaped, and strict about names that nobody passed."""
    environment = Environment(
        loader=FileSystemLoader(resource_dir("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset_url"] = asset_url
    environment.filters["count"] = format_count
    environment.filters["moment"] = to_words
    environment.filters["rfc3339"] = to_rfc3339
    return environment


def make_template_config() -> TemplateConfig[JinjaTemplateEngine]:
    """Return the template engine for the application."""
    return TemplateConfig(instance=JinjaTemplateEngine.from_environment(make_environment()))


def theme_of(request: Request[Any, Any, Any]) -> str:
    """Return the theme that this browser asked for; dark unless it did."""
    theme = request.cookies.get(THEME_COOKIE, "")
    return theme if theme in THEMES else THEMES[0]


def render_error_page(request: Request[Any, Any, Any], status: int, message: str) -> Template:
    """Return the page for an error that a person runs into; `message` says what to do.

    An address that nothing answers to has no message but the status's own phrase.
    """
    return Template(
        template_name="errors/error.html",
        context={
            "theme": theme_of(request),
            "status": status,
            "title": _ERROR_TITLES.get(status, "That did not work"),
            "message": _NOTHING_HERE if message == HTTPStatus.NOT_FOUND.phrase else message,
        },
        status_code=status,
        headers={"Cache-Control": "no-store"},
    )
