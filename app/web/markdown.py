"""Markdown of a model to HTML that can do nothing: no HTML of its own, no images, only plain links.

What a model writes is untrusted. The parser escapes all HTML in it, and what comes out is cleaned again by
a list of what is allowed. This is the one place that makes markup out of text.
"""

import logging
import re
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup, escape

from app.services.workers import DeadlineError, Workers, WorkersLostError
from engine.errors import QueueFullError

logger = logging.getLogger(__name__)

MAX_CHARS: Final = 200_000
"""A longer text is shown as it is."""

MAX_INLINE_CHARS: Final = 500
"""A longer text is rendered off the event loop."""

DEADLINE_S: Final = 2.0
"""A text that takes longer to render is shown as it is."""

MAX_CACHED_CHARS: Final = 8 * 2**20

_SCHEME: Final = re.compile(r"(?:https?://|mailto:)", re.IGNORECASE)
_ALIGN: Final = {"text-align:left": "left", "text-align:center": "center", "text-align:right": "right"}
_TAGS: Final = {
    *("p", "br", "hr", "blockquote", "pre", "code", "em", "strong", "s", "a"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
_LOWEST_HEADING: Final = 6
_HEADING_SHIFT: Final = 3
"""A `#` of an answer is no heading of the page: its messages have level 3."""


def render_markdown(text: str) -> Markup:
    """Return safe HTML; takes time in proportion to the text."""
    html = _PARSER.render(text)
    cleaned = nh3.clean(
        html,
        tags=_TAGS,
        attributes={"a": {"href", "title"}, "ol": {"start"}},
        attribute_filter=_filter_attribute,
        tag_attribute_values={"th": {"align": set(_ALIGN.values())}, "td": {"align": set(_ALIGN.values())}},
        set_tag_attribute_values={"a": {"target": "_blank"}},
        link_rel="noopener nofollow",
        url_schemes={"http", "https", "mailto"},
    )
    return Markup(cleaned)  # noqa: S704 - the one place; tests/unit/app/web/test_markdown.py attacks it


def render_plain(text: str) -> Markup:
    """Return a text as it is, lines kept."""
    return Markup('<p class="plain-text">{}</p>').format(escape(text))


class MarkdownRenderer:
    """Renders off the event loop what is long, and remembers what was rendered."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._workers = Workers("pageglass-markdown", num_workers=1, max_waiting=64)
        self._cache: OrderedDict[str, Markup] = OrderedDict()
        self._num_chars = 0

    async def render(self, text: str) -> Markup:
        """Return safe HTML of a text; the text itself if that takes too long."""
        cached = self._cache.get(text)
        if cached is not None:
            self._cache.move_to_end(text)
            return cached
        html = await self._render(text)
        self._remember(text, html)
        return html

    async def render_all(self, texts: Iterable[str]) -> dict[str, Markup]:
        """Return each text with its HTML."""
        return {text: await self.render(text) for text in texts}

    async def _render(self, text: str) -> Markup:
        if len(text) > MAX_CHARS:
            return render_plain(text)
        if len(text) <= MAX_INLINE_CHARS:
            return render_markdown(text)
        try:
            return await self._workers.run(partial(render_markdown, text), deadline_s=DEADLINE_S)
        except (DeadlineError, WorkersLostError, QueueFullError) as error:
            logger.debug("A text of %d characters is shown as it is: %s", len(text), error)
            return render_plain(text)

    def _remember(self, text: str, html: Markup) -> None:
        if text in self._cache:
            return
        self._cache[text] = html
        self._num_chars += len(text) + len(html)
        while self._num_chars > MAX_CACHED_CHARS:
            old_text, old_html = self._cache.popitem(last=False)
            self._num_chars -= len(old_text) + len(old_html)


def _filter_attribute(tag: str, name: str, value: str) -> str | None:
    if (tag, name) == ("a", "href"):
        return value if _SCHEME.match(value) else None
    return value


def _make_parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "linkify": False, "typographer": False})
    parser.enable(["table", "strikethrough"])
    parser.disable(["image", "html_block", "html_inline"])
    parser.validateLink = _is_allowed_link  # type: ignore[method-assign] # the library's way to decide it
    parser.core.ruler.push("pageglass", _adapt)
    return parser


def _is_allowed_link(url: str) -> bool:
    return _SCHEME.match(url.strip()) is not None


def _adapt(state: Any) -> None:
    """Lower headings and say alignment without a style attribute, which the page's policy forbids."""
    tokens: list[Token] = state.tokens
    for token in tokens:
        if token.type in {"heading_open", "heading_close"}:
            level = min(_LOWEST_HEADING, int(token.tag[1:]) + _HEADING_SHIFT)
            token.tag = f"h{level}"
        elif token.type in {"th_open", "td_open"}:
            align = _ALIGN.get(str(token.attrs.pop("style", "")))
            if align is not None:
                token.attrs["align"] = align


_PARSER: Final = _make_parser()
