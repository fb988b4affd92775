"""Builders for engine tests: small engines, requests, random runs, and the engine's books as data."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

from engine.config import PREEMPTION_MODES, EngineConfig
from engine.core import EngineCore
from engine.errors import RequestError
from engine.records import Policies, StepResult, StopReason
from engine.runner.fake import FakeRunner, extend_history, next_token
from engine.sampling_params import SamplingParams
from engine.scheduling.preemption import PREEMPTION_POLICIES
from engine.scheduling.queue import QUEUE_POLICIES
from engine.sequence import EngineRequest, Sequence
from engine.snapshot import EngineSnapshot

VOCAB_SIZE = 1000


def make_config(**overrides: Any) -> EngineConfig:
    """Return a tiny configuration: 8 blocks of 4 tokens, 4 sequences, 16 tokens a step."""
    settings: dict[str, Any] = {
        "num_blocks": 8,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 32,
        **overrides,
    }
    settings["max_model_len"] = min(
        settings["max_model_len"], settings["num_blocks"] * settings["block_size"]
    )
    return EngineConfig(**settings)


def make_core(*, eos_token_ids: frozenset[int] = frozenset(), **overrides: Any) -> EngineCore:
    """Return an engine over `FakeRunner`."""
    load_steps = overrides.pop("load_steps", 1)
    config = make_config(**overrides)
    runner = FakeRunner(
        config.num_blocks,
        config.block_size,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=eos_token_ids,
        load_steps=load_steps,
    )
    return EngineCore(config, runner)


def make_request(
    request_id: str = "r0",
    *,
    prompt: list[int] | int = 6,
    max_tokens: int = 4,
    choice_index: int = 0,
    **params: Any,
) -> EngineRequest:
    """Return a request; an int prompt means that many tokens, made from the request's id."""
    if isinstance(prompt, int):
        prompt = [(sum(request_id.encode()) + 7 * position) % VOCAB_SIZE for position in range(prompt)]
    cache_salt = params.pop("cache_salt", None)
    priority = params.pop("priority", 0)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        choice_index=choice_index,
        cache_salt=cache_salt,
        priority=priority,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
    )


def solo_output(prompt: list[int], num_tokens: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Return what `FakeRunner` generates for a prompt when nothing disturbs it."""
    history, output = b"", []
    for token_id in prompt:
        history = extend_history(history, token_id)
    for _ in range(num_tokens):
        output.append(next_token(history, vocab_size))
        history = extend_history(history, output[-1])
    return output


def run_to_end(core: EngineCore, max_steps: int = 10_000) -> list[StepResult]:
    """Step until nothing is left; every step must pass the integrity check."""
    results: list[StepResult] = []
    while core.has_work:
        results.append(core.step())
        core.check_integrity()
        assert len(results) <= max_steps, "no end in sight"
    return results


def tokens_of(results: list[StepResult]) -> dict[str, list[int]]:
    """Collect the generated tokens by request."""
    tokens: dict[str, list[int]] = {}
    for result in results:
        for output in result.outputs:
            if output.token_id >= 0:
                tokens.setdefault(output.request_id, []).append(output.token_id)
    return tokens


def random_run(
    seed: int,
    num_steps: int,
    *,
    abort_rate: float = 0.05,
    fail_rate: float = 0.0,
    policy_rate: float = 0.0,
    **overrides: Any,
) -> Iterator[tuple[EngineCore, StepResult]]:
    """Drive a tiny engine with random traffic; yield the engine after each of `num_steps` records.

    Arrivals share prefixes, have priorities, some are too long, some are aborted, running or waiting; with
    `fail_rate` steps fail and the engine is reset; with `policy_rate` somebody changes the policies.
    """
    rng = random.Random(seed)
    core = make_core(**{"num_blocks": 24, "max_num_seqs": 6, "max_model_len": 64, **overrides})
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(4, 30))] for _ in range(4)]
    request_ids: list[str] = []
    num_records = 0
    while num_records < num_steps:
        for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
            if len(core.scheduler.state.waiting) < 12:
                request_ids.append(f"q{len(request_ids)}")
                prompt = rng.choice(prefixes) + [
                    rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(0, 9))
                ]
                if rng.random() < 0.04:
                    prompt = prompt * 20
                with contextlib.suppress(RequestError):
                    core.add_request(
                        make_request(
                            request_ids[-1],
                            prompt=prompt,
                            max_tokens=rng.randrange(1, 24),
                            priority=rng.choice([-10, 0, 0, 10]),
                            temperature=rng.choice([0.0, 0.7, 1.0]),
                        )
                    )
        if rng.random() < policy_rate:
            core.set_policies(random_policies(rng, has_host_tier=core.config.num_host_blocks > 0))
        if request_ids and rng.random() < abort_rate:
            core.abort(rng.choice(request_ids[-12:]))
        result: StepResult | None
        if core.has_work and rng.random() < fail_rate:
            result = core.fail_all("injected")
        else:
            result = core.step() if core.has_work else core.flush()
        if result is not None:
            num_records += 1
            yield core, result


def random_policies(rng: random.Random, *, has_host_tier: bool) -> Policies:
    """Return policies that go together."""
    modes = PREEMPTION_MODES if has_host_tier else ("auto", "recompute")
    return Policies(rng.choice(QUEUE_POLICIES), rng.choice(PREEMPTION_POLICIES), rng.choice(modes))


def state_from_books(core: EngineCore) -> dict[str, Any]:
    """Describe the engine from its own structures, without any record.

    Same shape as `EngineSnapshot.to_dict()`, restricted to what the books know: counts, running,
    waiting and blocks.
    """
    scheduler, pool = core.scheduler.state, core.scheduler.state.kv.pool
    holders: dict[int, list[Sequence]] = {}
    for sequence in scheduler.running:
        for block_id in sequence.block_table:
            holders.setdefault(block_id, []).append(sequence)
    orphans = {
        block_id: load.slot
        for load in scheduler.kv.loads.values()
        if load.is_orphan
        for _, block_id in load.pairs
    }
    return {
        "counts": {
            "total": pool.num_blocks,
            "free": sum(block.ref_cnt == 0 and block.block_hash is None for block in pool.blocks),
            "cached": sum(block.ref_cnt == 0 and block.block_hash is not None for block in pool.blocks),
            "used": sum(block.ref_cnt > 0 for block in pool.blocks),
        },
        "running": [_sequence_facts(sequence) for sequence in scheduler.running],
        "waiting": [_sequence_facts(sequence) for sequence in scheduler.waiting],
        "blocks": [
            _block_facts(core, block_id, holders.get(block_id, []), orphans.get(block_id))
            for block_id in range(pool.num_blocks)
        ],
        "host": {
            "total": scheduler.kv.host.num_blocks,
            "used": scheduler.kv.host.num_used,
            "pinned": scheduler.kv.host.num_pinned,
        },
    }


def folded_state(snapshot: EngineSnapshot) -> dict[str, Any]:
    """Return the same facts as `state_from_books`, from the fold."""
    state = snapshot.to_dict()
    keys = _sequence_facts(Sequence(0, make_request(), 1)).keys()
    return {
        "counts": state["counts"],
        "running": [{key: view[key] for key in keys} for view in state["running"]],
        "waiting": [{key: view[key] for key in keys} for view in state["waiting"]],
        "blocks": state["blocks"],
        "host": state["host"],
    }


def _sequence_facts(sequence: Sequence) -> dict[str, Any]:
    return {
        "seq_id": sequence.seq_id,
        "request_id": sequence.request_id,
        "choice_index": sequence.choice_index,
        "slot": sequence.slot,
        "num_tokens": sequence.num_tokens,
        "num_computed_tokens": sequence.num_computed_tokens,
        "block_table": sequence.block_table,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "num_cached_tokens": sequence.num_cached_tokens,
        "num_preemptions": sequence.num_preemptions,
        "max_tokens": sequence.max_tokens,
        "priority": sequence.priority,
        "due_ns": sequence.due_ns,
        "is_loading": sequence.load_id != 0,
    }


def _block_facts(
    core: EngineCore, block_id: int, holders: list[Sequence], orphan_slot: int | None
) -> dict[str, Any]:
    block_size = core.config.block_size
    block = core.scheduler.state.kv.pool.blocks[block_id]
    if holders:
        oldest = holders[0]
        computed = oldest.num_computed_tokens - oldest.block_table.index(block_id) * block_size
        filled = max(0, min(block_size, computed))
        alone = "active" if filled == block_size else "tail" if filled else "reserved"
        state = "shared" if len(holders) > 1 else alone
        owner, slot = oldest.request_id, oldest.slot
    elif orphan_slot is not None:
        state, owner, filled, slot = "reserved", None, 0, orphan_slot
    else:
        cached = block.block_hash is not None
        state, owner = ("cached" if cached else "free"), None
        filled, slot = (block_size if cached else 0), (block.last_slot if cached else -1)
    return {
        "id": block_id,
        "state": state,
        "ref_cnt": block.ref_cnt,
        "owner": owner,
        "slot": slot,
        "filled": filled,
        "hash": block.block_hash[:8].hex() if block.block_hash else None,
    }


def stop_reasons(results: list[StepResult]) -> set[StopReason]:
    """Return the reasons for which the scheduler stopped admitting."""
    return {StopReason(result.record.stop_reason) for result in results}
