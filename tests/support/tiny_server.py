"""A real server on a random two-layer model: ready sooner than the default, a step takes a millisecond."""

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx

from tests.support.models import VARIANTS, make_reference, write_folder
from tests.support.server import ServerProcess
from tests.support.tokenizers import make_byte_level, write_tokenizer

NUM_BLOCKS = 24
"""Of 16 tokens: requests share, evict and preempt."""


def write_tiny_model(folder: Path) -> Path:
    """Write the model's folder."""
    write_folder(make_reference(VARIANTS["llama tied"]), folder)
    write_tokenizer(folder, make_byte_level())
    return folder


def tiny_server(model: Path, data_dir: Path, *arguments: str, **options: Any) -> ServerProcess:
    """Return a server that is not started yet; all that use `data_dir` share its history."""
    return ServerProcess(
        *("--model", str(model), "--num-blocks", str(NUM_BLOCKS), "--max-num-seqs", "8", *arguments),
        data_dir=data_dir,
        is_forked=True,
        **options,
    )


async def ask(client: httpx.AsyncClient, model: str, rng: random.Random) -> str:
    """Have one completion made; return its id."""
    prefix = list(range(10, 10 + 16 * rng.randrange(1, 4)))
    body = {
        "model": model,
        "prompt": [*prefix, *(rng.randrange(10, 250) for _ in range(rng.randrange(1, 20)))],
        "max_tokens": rng.randrange(8, 80),
        "ignore_eos": True,
        "temperature": 1,
    }
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return str(answer["id"])


async def served_model(client: httpx.AsyncClient) -> str:
    """Return the name to ask for."""
    answer = (await client.get("/v1/models")).json()
    return str(answer["data"][0]["id"])


async def make_load(client: httpx.AsyncClient, num_clients: int, on_answer: Any, seed: int) -> None:
    """Have so many clients ask one request after the other, until cancelled or the server is gone."""
    model = await served_model(client)

    async def go_on(number: int) -> None:
        rng = random.Random(1000 * seed + number)
        while True:
            try:
                on_answer(await ask(client, model, rng))
            except httpx.HTTPError:
                return

    await asyncio.gather(*(go_on(number) for number in range(num_clients)))
