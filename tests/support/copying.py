"""Copies between KV pool and host tier under a test's control: held back, made late, made to fail."""

import threading

from engine.runner.copier import BlockCopier, BlockMemory


class HeldMemory:
    """Passes copies on to other memory; those that are held wait, in the copying thread, for `release`.

    `out` and `back` say which direction is held. `made` lists the copies that have ended, as they came.
    """

    def __init__(self, memory: BlockMemory) -> None:
        self.num_blocks = memory.num_blocks
        self.num_host_blocks = memory.num_host_blocks
        self.made: list[tuple[str, int, int]] = []
        self.reached = threading.Event()
        """A copy that is held has been reached."""
        self._memory = memory
        self._gates = {"out": threading.Event(), "back": threading.Event()}
        self.release()

    def hold(self, direction: str) -> None:
        self._gates[direction].clear()
        self.reached.clear()

    def release(self) -> None:
        for gate in self._gates.values():
            gate.set()

    def copy_out(self, block_id: int, host_id: int) -> None:
        self._pass("out")
        self._memory.copy_out(block_id, host_id)
        self.made.append(("out", block_id, host_id))

    def copy_in(self, host_id: int, block_id: int) -> None:
        self._pass("back")
        self._memory.copy_in(host_id, block_id)
        self.made.append(("back", host_id, block_id))

    def _pass(self, direction: str) -> None:
        gate = self._gates[direction]
        if not gate.is_set():
            self.reached.set()
        assert gate.wait(60), "nobody releases the copies"


class LazyCopier(BlockCopier):
    """Copies without a thread: only what a step has to wait for, or what the test asks for.

    The latest that copies may happen, the worst case for whoever writes a block too early.
    """

    def copy_some(self, count: int) -> None:
        for _ in range(count):
            self._copy_next()

    def _start(self) -> None:
        pass

    def _wait_for(self, number: int) -> None:
        while self._num_ended < number and self._copy_next():
            pass
        self._raise_failure()

    def reset(self) -> None:
        self._jobs.clear()
        self._copy_next()
        super().reset()
