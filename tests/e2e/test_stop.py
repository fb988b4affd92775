"""How a real server ends: every client is told, the exit code says it went well."""

import asyncio
import json
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from app.model_store import DEFAULT_MODEL
from tests.support.api import read_events
from tests.support.server import REPOSITORY, ServerProcess
from tests.support.state import State, wait_for_state

EARLY_INTERRUPT = """
import os, signal, sys
from app.__main__ import run
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
sys.argv = ["pageglass", "--version"]
run()
"""
"""Presses Ctrl-C when a module is about to be imported."""


def long_chat(*, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Count to one thousand."}]
    return {
        "model": DEFAULT_MODEL,
        "messages": messages,
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": stream,
    }


async def post(url: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{url}/v1/chat/completions", json=body)


async def watch(url: str) -> int:
    """Watch the engine until the server closes the socket; return the close code."""
    socket_url = url.replace("http", "ws", 1) + "/ws/engine"
    async with connect(socket_url, max_size=None) as socket:
        try:
            while True:
                await socket.recv()
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else 1006


def four_answers_have_begun(state: State) -> bool:
    return [view["num_tokens"] - view["num_prompt_tokens"] > 2 for view in state["running"]] == [True] * 4


async def test_sigterm_ends_every_stream_with_an_error_that_says_so() -> None:
    with ServerProcess("--shutdown-timeout", "0.5") as server:
        streams = [asyncio.create_task(post(server.url, long_chat(stream=True))) for _ in range(3)]
        whole = asyncio.create_task(post(server.url, long_chat(stream=False)))
        socket = asyncio.create_task(watch(server.url))
        await asyncio.to_thread(wait_for_state, server.url, four_answers_have_begun)
        code = await asyncio.to_thread(server.stop, signal.SIGTERM)
        assert code == 0, server.output
        for response in await asyncio.gather(*streams):
            events = read_events(response.text)
            assert any(event["choices"][0]["delta"].get("content") for event in events[:-1])
            assert events[-1]["error"]["code"] == "server_shutdown"
        answer = await whole
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "server_shutdown"
        assert await socket == 1012
        assert "Traceback" not in server.output


async def test_ctrl_c_lets_short_answers_end_and_refuses_new_ones() -> None:
    with ServerProcess("--shutdown-timeout", "60", is_forked=True) as server:
        body = {**long_chat(stream=True), "max_tokens": 60}
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            async for line in lines:
                if '"content":"' in line:
                    break
            server.process.send_signal(signal.SIGINT)
            deadline = asyncio.get_running_loop().time() + 10
            while (ready := await client.get(f"{server.url}/health/ready")).status_code == 200:
                assert asyncio.get_running_loop().time() < deadline
            assert ready.json()["reason"] == "draining"
            refused = await post(server.url, long_chat(stream=True))
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            rest = [line async for line in lines]
        assert "data: [DONE]" in rest
        usage = [json.loads(line[6:]) for line in rest if line.startswith("data: {")][-1]
        assert usage["choices"][0]["finish_reason"] == "length"
        assert await asyncio.to_thread(server.wait_for_exit) == 0


async def test_a_second_ctrl_c_ends_the_process_at_once() -> None:
    with ServerProcess("--shutdown-timeout", "3600", is_forked=True) as server:
        stream = asyncio.create_task(post(server.url, long_chat(stream=True)))
        await asyncio.to_thread(wait_for_state, server.url, lambda state: bool(state["running"]))
        server.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(wait_for_state, server.url, lambda state: state["status"] == "draining")
        assert await asyncio.to_thread(server.stop, signal.SIGINT) == 130
        await asyncio.wait([stream])
        assert isinstance(stream.exception(), httpx.TransportError)


def test_sigterm_while_loading_is_obeyed() -> None:
    with ServerProcess(wait_ready=False) as server:
        assert server.stop(signal.SIGTERM) == 0
        assert "Traceback" not in server.output


def test_the_end_of_the_terminal_is_obeyed_like_sigterm() -> None:
    with ServerProcess(is_forked=True) as server:
        assert server.stop(signal.SIGHUP) == 0, server.output


@pytest.mark.parametrize("module", ["app.cli", "litestar", "uvicorn"])
def test_ctrl_c_in_the_first_moment_ends_quietly(module: str) -> None:
    command = [sys.executable, "-c", EARLY_INTERRUPT.format(module=module)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")
