"""Templates and asset addresses."""

import re

import jinja2
import pytest

from app.resources import resource_dir
from app.web.templating import NO_VALUE, asset_url, assets_version, format_percent, make_environment

TEMPLATES = sorted(
    path.relative_to(resource_dir("templates")).as_posix()
    for path in resource_dir("templates").rglob("*.html")
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_keeps_to_the_content_security_policy(name: str) -> None:
    source = (resource_dir("templates") / name).read_text(encoding="utf-8")
    assert not re.search(r"\sstyle\s*=", source), "inline style"
    assert not re.search(r"\son\w+\s*=", source), "inline event handler"
    assert not re.search(r"hx-on|js:|javascript:", source), "needs eval"
    assert not re.search(r"hx-trigger=\"[^\"]*\[", source), "trigger filters need eval"
    assert not re.search(r"<style|<script(?![^>]*\ssrc=)", source), "inline code"
    assert "|safe" not in source.replace(" ", "")
    assert not re.search(r"(src|href)=\"https?:", source), "something from another host"


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_parses(name: str) -> None:
    make_environment().get_template(name)


def test_names_that_nobody_passed_are_errors() -> None:
    with pytest.raises(jinja2.UndefinedError):
        make_environment().from_string("{{ nobody }}").render()


def test_values_are_escaped() -> None:
    assert make_environment().from_string("{{ x }}").render(x="<b>") == "&lt;b&gt;"


def test_asset_addresses_name_the_content() -> None:
    assert asset_url("css/app.css") == f"/static/{assets_version()}/css/app.css"
    with pytest.raises(FileNotFoundError, match=r"css/none\.css"):
        asset_url("css/none.css")


def test_percentages_of_nothing_are_a_dash() -> None:
    assert format_percent(1, 3) == "33%"
    assert format_percent(0, 0) == NO_VALUE


def test_a_percentage_says_0_of_nothing_and_100_of_everything_alone() -> None:
    shares = [(0, 96), (1, 1000), (5, 1000), (1, 8), (999, 1000), (1000, 1000)]
    assert [format_percent(*share) for share in shares] == ["0%", "<1%", "1%", "13%", ">99%", "100%"]
