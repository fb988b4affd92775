"""Copies end before the process does; one that never ends does not keep it alive."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from engine.runner import copying_thread
from engine.runner.copying_thread import CopyingThread, end_copying

PROCESS = """
import threading, time
import numpy as np
from engine.runner import copying_thread
from engine.runner.copier import ArrayBlocks, BlockCopier
from engine.scheduling.output import SchedulerOutput

class Memory(ArrayBlocks):
    def copy_out(self, block_id, host_id):
        reached.set()
        if block_id == 7:
            threading.Event().wait()
        time.sleep(0.02)
        print(block_id, flush=True)

reached = threading.Event()
copier = BlockCopier(Memory(np.zeros((8, 4), np.uint8), 4), 4)
copier.begin(SchedulerOutput(swap_outs={swap_outs}))
assert reached.wait(20)
copying_thread.EXIT_TIMEOUT_S = {timeout_s}
print("over", flush=True)
"""


def run_process(swap_outs: list[tuple[int, int]], timeout_s: float) -> "subprocess.CompletedProcess[str]":
    code = PROCESS.format(swap_outs=swap_outs, timeout_s=timeout_s)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True
    )


def test_a_process_ends_although_a_copy_does_not_and_says_so() -> None:
    ended = run_process([(7, 0), (1, 1)], 0.01)
    assert ended.stdout == "over\n"
    assert ended.stderr == (
        "A copy between KV pool and host tier does not end; the process ends without it.\n"
    )


def test_a_process_waits_for_copies_that_end() -> None:
    ended = run_process([(1, 0), (2, 1), (3, 2)], 20)
    assert sorted(ended.stdout.split()) == ["1", "2", "3", "over"]
    assert ended.stderr == ""


def _wait(gate: threading.Event) -> None:
    assert gate.wait(20)


@pytest.fixture
def thread() -> Iterator[CopyingThread]:
    thread = CopyingThread()
    thread.start()
    yield thread
    thread.inbox.put(None)
    thread.join(20)
    assert not thread.is_alive()


def test_what_is_queued_is_done_before_the_thread_ends(thread: CopyingThread) -> None:
    done: list[int] = []
    for number in range(5):
        thread.inbox.put(partial(done.append, number))
    assert end_copying()
    assert done == [0, 1, 2, 3, 4]
    assert not thread.is_alive()


def test_a_thread_that_does_not_end_is_told(thread: CopyingThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying_thread, "EXIT_TIMEOUT_S", 0.0)
    gate = threading.Event()
    thread.inbox.put(partial(_wait, gate))
    try:
        assert not end_copying()
    finally:
        gate.set()
