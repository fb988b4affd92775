"""Runs the tests of the chat's modules under node."""

from tests.support.node import run_node


def test_the_chat_modules_hold_what_they_promise() -> None:
    assert "fail 0" in run_node("chat_check.mjs")
