"""Models whose chat template is hostile or broken, served by a real process."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import VARIANTS, make_reference, write_folder
from tests.support.server import ServerProcess
from tests.support.tokenizers import make_byte_level, write_tokenizer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
STOP_TIMEOUT_S = 10.0
"""Of an hour that the template would take; a process that stops at all takes two seconds."""


def make_model(folder: Path, chat_template: str) -> Path:
    write_folder(make_reference(VARIANTS["llama tied"]), folder)
    write_tokenizer(folder, make_byte_level(), chat_template=chat_template)
    return folder


async def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": "model", "max_tokens": 2, **body}
        return await client.post(f"{url}/v1/{path}", json=body)


def wait_until_open(url: str, count: int) -> None:
    deadline = time.monotonic() + 10
    while httpx.get(f"{url}/health", timeout=10).json()["num_open_requests"] < count:
        assert time.monotonic() < deadline


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def test_sigterm_ends_a_server_whose_template_never_ends(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", ENDLESS)
    with ServerProcess(
        "--model", str(model), "--num-blocks", "16", "--shutdown-timeout", "0.5", is_forked=True
    ) as server:
        chats = [asyncio.create_task(post(server.url, "chat/completions", CHAT)) for _ in range(4)]
        await asyncio.to_thread(wait_until_open, server.url, 4)
        assert await asyncio.to_thread(server.stop, signal.SIGTERM, STOP_TIMEOUT_S) == 0
        for response in await asyncio.gather(*chats):
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (503, "server_shutdown")
        assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("{% broken", "chat_template_error"),
        (ENDLESS, "chat_template_error"),
        ("{{ 'a' * 3000000 }}", "context_length_exceeded"),
    ],
)
async def test_a_model_whose_template_is_of_no_use_serves_completions(
    template: str, code: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", template)
    with ServerProcess("--model", str(model), "--num-blocks", "16", is_forked=True) as server:
        refused = await post(server.url, "chat/completions", CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, code)
        assert (await post(server.url, "completions", {"prompt": "hi"})).status_code == 200
        assert ("Chats will be refused" in server.output) == (template == "{% broken")
