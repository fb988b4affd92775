"""`/api/engine/state` of a real server."""

import time
from collections.abc import Callable
from typing import Any

import httpx

State = dict[str, Any]

TIMEOUT_S = 30.0
POLL_S = 0.02


def read_state(url: str, *, blocks: bool = False) -> State:
    """Return the engine's state; without blocks it is small."""
    response = httpx.get(f"{url}/api/engine/state", params={"blocks": int(blocks)}, timeout=10)
    response.raise_for_status()
    state: State = response.json()
    return state


def wait_for_state(url: str, condition: Callable[[State], bool]) -> State:
    """Return the first state that fulfils a condition; fails after half a minute."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition(state := read_state(url)):
        assert time.monotonic() < deadline, f"the state did not come about; the last one was {state}"
        time.sleep(POLL_S)
    return state
