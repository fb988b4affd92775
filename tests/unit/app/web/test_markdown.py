"""Markdown of a model: what it may become, and what it never may."""

import asyncio
import re

import pytest
from markupsafe import Markup

from app.web import markdown
from app.web.markdown import MarkdownRenderer, render_markdown

PAYLOADS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '<svg onload="alert(1)"><circle/></svg>',
    '<a href="javascript:alert(1)">x</a>',
    '<iframe src="//evil.example"></iframe>',
    "<style>*{display:none}</style>",
    "<!-- --><body onload=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\nscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](javascript&colon;alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x](vbscript:msgbox(1))",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](file:///etc/passwd)",
    "[x](//evil.example)",
    "[x](/chat/1/delete)",
    "<javascript:alert(1)>",
    "[x]\n\n[x]: javascript:alert(1)",
    '[x](https://a.example "&quot; onclick=alert(1) x=&quot;")',
    "![x](javascript:alert(1))",
    "![x](https://evil.example/pixel.png)",
    "![x](x){onerror=alert(1)}",
    "```html\n<script>alert(1)</script>\n```",
    '```"><img src=x onerror=alert(1)>\nx\n```',
    "`<img src=x onerror=alert(1)>`",
    "|a|\n|-|\n|<img src=x onerror=alert(1)>|",
    "# <b onmouseover=alert(1)>x</b>",
    "> <object data=x></object>",
    '<div hx-get="/chat" hx-trigger="load"></div>',
    "<form action=/chat method=post><button>x</button></form>",
    "<math><mtext></mtext><mglyph><svg><mtext><style><img src=x onerror=alert(1)>",
    "</div></article><script>alert(1)</script>",
]

ALLOWED = re.compile(
    r"</?(?:p|br|hr|blockquote|pre|code|em|strong|s|h[4-6]|ul|li|table|thead|tbody|tr)/?>"
    r"|</?ol(?: start=\"\d+\")?>|</?t[hd](?: align=\"(?:left|right|center)\")?>|</a>"
    r"|<a href=\"(?:https?://|mailto:)[^\"]*\"(?: title=\"[^\"]*\")?"
    r" target=\"_blank\" rel=\"noopener nofollow\">",
    re.IGNORECASE,
)
"""Every tag that may come out, letter by letter."""


@pytest.mark.parametrize("payload", PAYLOADS)
def test_only_harmless_tags_come_out(payload: str) -> None:
    for text in (payload, f"- {payload}", f"before {payload} after\n\n{payload}"):
        html = render_markdown(text)
        assert "<" not in ALLOWED.sub("", html), html
        assert not re.search(r"<[^>]*(?:javascript|vbscript|data:|onerror|onload)", html, re.IGNORECASE), html


def test_plain_markdown_becomes_markup() -> None:
    html = render_markdown(
        "# Title\n\nSome *words*, **bold** and ~~gone~~, `code`.\n\n- one\n- two\n\n3. three\n\n> quoted\n\n"
        "| a | b |\n|--:|:-:|\n| 1 | 2 |\n\n```py\nx = 1 < 2\n```\n\n[link](https://example.org 'why')"
    )
    for piece in (
        "<h4>Title</h4>",
        "<em>words</em>",
        "<strong>bold</strong>",
        "<s>gone</s>",
        "<code>code</code>",
        "<li>one</li>",
        '<ol start="3">',
        "<blockquote>",
        '<td align="right">1</td>',
        '<td align="center">2</td>',
        "<pre><code>x = 1 &lt; 2\n</code></pre>",
        '<a href="https://example.org" title="why" target="_blank" rel="noopener nofollow">link</a>',
    ):
        assert piece in html


def test_addresses_of_mail_and_web_are_links() -> None:
    html = render_markdown("<https://example.org/a?b=1&c=2> <mailto:x@example.org>")
    assert 'href="https://example.org/a?b=1&amp;c=2"' in html
    assert 'href="mailto:x@example.org"' in html


@pytest.mark.parametrize("text", ["> " * 5000, "[" * 5000, "*" * 9000, "_a " * 9000, "`" * 9000, "|" * 9000])
async def test_text_that_is_hard_to_parse_comes_out_all_the_same(text: str) -> None:
    assert isinstance(await MarkdownRenderer().render(text), Markup)


async def test_a_text_that_takes_too_long_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "render_markdown", _never_end)
    monkeypatch.setattr(markdown, "DEADLINE_S", 0.05)
    renderer = MarkdownRenderer()
    text = "<b>long</b> " * 200
    html = await renderer.render(text)
    assert html.startswith('<p class="plain-text">&lt;b&gt;long')
    assert await renderer.render(text) == html


def _never_end(_: str) -> Markup:
    number = 0
    while True:
        number += 1


async def test_texts_that_are_too_long_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "MAX_CHARS", 10)
    assert await MarkdownRenderer().render("# a\n\n**b** and more") == (
        '<p class="plain-text"># a\n\n**b** and more</p>'
    )


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "MAX_CACHED_CHARS", 1000)
    renderer = MarkdownRenderer()
    await asyncio.gather(*(renderer.render(f"text {number} " * 10) for number in range(40)))
    assert 0 < renderer._num_chars <= 1000
