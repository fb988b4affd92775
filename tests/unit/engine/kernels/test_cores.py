"""Threads of a step keep off each other's cores, and get by with one."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kernels.cpu.instruction_sets import runnable
from engine.kernels.cpu.library import NativeModel, NativeSizes, StepBatch, Want
from tests.support.native import Shape, TinyModel

pytestmark = pytest.mark.skipif(not runnable(), reason="this CPU runs none of the native kernels")

MOST_STEPS = 500


def threads() -> set[int]:
    return {int(folder.name) for folder in Path("/proc/self/task").iterdir()}


def core_of(thread: int) -> int:
    return int(Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[36])


@pytest.fixture
def pair() -> Iterator[tuple[NativeModel, int]]:
    """A model of two threads, one of them this one, and the other one's number."""
    allowed, before = os.sched_getaffinity(0), threads()
    sizes = NativeSizes(
        num_positions=256, block_size=16, num_blocks=16, dtype="int8", kv_dtype="bf16", num_threads=2
    )
    model = TinyModel(Shape(hidden_size=256, intermediate_size=512)).make_native(runnable()[0], sizes)
    (helper,) = threads() - before
    yield model, helper
    os.sched_setaffinity(0, allowed)
    model.close()


def compute(model: NativeModel) -> int:
    batch = StepBatch()
    batch.token_ids.extend([7] * 128)
    batch.num_computed.append(0)
    batch.num_scheduled.append(128)
    batch.tables.extend(range(8))
    batch.table_starts.append(8)
    batch.wants.append(Want.GREEDY)
    batch.temperatures.append(1.0)
    batch.top_ks.append(0)
    batch.top_ps.append(1.0)
    batch.uniforms.append(0.0)
    return model.step(batch).token_ids[0]


def test_a_thread_on_the_core_of_another_goes_elsewhere(pair: tuple[NativeModel, int]) -> None:
    model, helper = pair
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("there is one core only")
    core = min(allowed)
    os.sched_setaffinity(threading.get_native_id(), {core})
    os.sched_setaffinity(helper, {core})
    os.sched_setaffinity(helper, allowed)  # it may leave from here on, but nothing makes it
    for _ in range(MOST_STEPS):
        compute(model)
        if core_of(helper) != core:
            break
    assert core_of(helper) != core
    assert os.sched_getaffinity(helper) == allowed, "it is bound to no core"


def test_threads_get_by_with_one_core(pair: tuple[NativeModel, int]) -> None:
    model, helper = pair
    token_id = compute(model)
    core = {min(os.sched_getaffinity(0))}
    os.sched_setaffinity(threading.get_native_id(), core)
    os.sched_setaffinity(helper, core)
    assert [compute(model) for _ in range(20)] == [token_id] * 20
