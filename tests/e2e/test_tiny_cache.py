"""A real server whose cache holds next to nothing: requests wait, give way and still all end."""

import asyncio
from typing import Any

import httpx

from app.model_store import DEFAULT_MODEL
from tests.support.server import ServerProcess
from tests.support.state import read_state, wait_for_state


async def complete(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> httpx.Response:
    body: dict[str, Any] = {"model": DEFAULT_MODEL, "prompt": prompt, "max_tokens": max_tokens}
    return await client.post("/v1/completions", json={**body, "temperature": 0, "ignore_eos": True})


def make_prompt(start: int, num_tokens: int) -> list[int]:
    return list(range(start, start + num_tokens))


async def test_a_cache_of_two_blocks_leaves_requests_waiting_and_refuses_what_can_never_fit() -> None:
    with ServerProcess("--dtype", "fp32", "--num-blocks", "2", is_forked=True) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert model["max_model_len"] == 32
            never = await complete(client, make_prompt(1000, 32), 1)
            assert (never.status_code, never.json()["error"]["code"]) == (400, "context_length_exceeded")
            tasks = [
                asyncio.create_task(complete(client, make_prompt(1000 * index, 17), 12))
                for index in range(1, 5)
            ]
            state = await asyncio.to_thread(
                wait_for_state, server.url, lambda state: bool(state["running"] and state["waiting"])
            )
            assert len(state["running"]) == 1  # each of them needs both blocks
            assert {view["reason"] for view in state["waiting"]} == {"no_free_blocks"}
            for response in await asyncio.gather(*tasks):
                assert response.json()["usage"]["completion_tokens"] == 12
        totals = read_state(server.url)["totals"]
        assert (totals["num_finished"], totals["num_rejected"]) == (4, 1)


async def test_a_long_and_five_short_requests_all_end_in_a_cache_of_four_blocks() -> None:
    with ServerProcess("--dtype", "fp32", "--num-blocks", "4", is_forked=True) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            long = asyncio.create_task(
                complete(client, make_prompt(1000, 20), 44)
            )  # 64 tokens: all four blocks
            short = [
                asyncio.create_task(complete(client, make_prompt(1000 * index, 10), 12))
                for index in range(2, 7)
            ]
            assert (await long).json()["usage"]["completion_tokens"] == 44
            for response in await asyncio.gather(*short):
                assert response.json()["usage"]["completion_tokens"] == 12
        state = read_state(server.url, blocks=True)
        assert state["totals"]["num_preemptions"] > 0
        assert state["totals"]["num_finished"] == 6
        assert {block["state"] for block in state["blocks"]} <= {"free", "cached"}
