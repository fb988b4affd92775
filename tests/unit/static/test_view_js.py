"""Runs the tests of the live view's modules under node."""

from tests.support.node import run_node


def test_the_view_modules_hold_what_they_promise() -> None:
    assert "fail 0" in run_node("view_check.mjs")
