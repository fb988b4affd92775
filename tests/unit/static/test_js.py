"""Runs the JavaScript tests of tests/js under node."""

import pytest

from tests.support.node import run_node


@pytest.mark.parametrize("script", ["reducer_check.mjs", "stream_check.mjs", "replay_check.mjs"])
def test_javascript(script: str) -> None:
    assert "fail 0" in run_node(script)
