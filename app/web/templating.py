"""Templates and static files: one Jinja environment, and asset addresses that name their content.

All static files are served below `/static/<hash of all of them>/`, so that modules can import each other by
relative path, browsers may keep everything for ever, and a new version is never mixed with an old one.
"""

import errno
import hashlib
import math
from functools import cache
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Request, Router
from litestar.datastructures import CacheControlHeader
from litestar.file_system import BaseLocalFileSystem
from litestar.plugins.jinja import JinjaTemplateEngine
from litestar.static_files import create_static_files_router
from litestar.template import TemplateConfig
from litestar.types import PathType
from litestar.types.file_types import FileInfo

from app.resources import resource_dir
from app.web.moments import to_exact_words, to_rfc3339, to_words

CACHE_SECONDS: Final = 365 * 24 * 3600
HASH_CHARS: Final = 16
NO_VALUE: Final = "\u2013"
"""Stands where a number would, when there is none."""

THEME_COOKIE: Final = "pageglass_theme"
THEMES: Final = ("dark", "light", "system")
"""The first one is that of a browser that has not chosen."""

_NO_FILE_NAME: Final = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EILSEQ}
"""What a file system says of names that no file of it can have."""


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
    """Return part / whole as a percentage without decimals; a dash when there is no whole.

    0% is said of nothing and 100% of everything alone, as `formatPercent` of static/js/format.js does.
    """
    if not whole:
        return NO_VALUE
    percent = math.floor(100 * part / whole + 0.5)
    if percent == 0 and part > 0:
        return "<1%"
    if percent == 100 and part < whole:
        return ">99%"
    return f"{percent}%"


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
    environment.filters["exact_moment"] = to_exact_words
    environment.filters["rfc3339"] = to_rfc3339
    return environment


def make_template_config() -> TemplateConfig[JinjaTemplateEngine]:
    """Return the template engine for the application."""
    return TemplateConfig(instance=JinjaTemplateEngine.from_environment(make_environment()))


def theme_of(request: Request[Any, Any, Any]) -> str:
    """Return the theme that this browser asked for; dark unless it did."""
    theme = request.cookies.get(THEME_COOKIE, "")
    return theme if theme in THEMES else THEMES[0]
