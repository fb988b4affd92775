"""Which threads of a server use CPU time, and how long its engine is outside the model.

A server started by `bench.recorded` or `bench.unrecorded` calls `install`; `ServerProbe` asks it, from
another process. The kernel counts the CPU time of each thread in nanoseconds, which it shows in
/proc/<pid>/task/<tid>/schedstat, and that of the process with threads that have ended. Threads are told apart
by the names that the kernel knows: one that Python starts gets its Python name, and a native one has that of
the thread that made it, so that those of the kernels are the engine's. Linux only.
"""

import json
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MAX_NAME_CHARS = 15
"""Of a thread's name, as Linux keeps it."""

ENGINE = "pageglass-engine"[:MAX_NAME_CHARS]
"""Threads that compute steps: the engine's own, and those of its kernels."""

LOOP = "event loop"
ENDED = "ended"
"""Stands for threads that are gone."""

_PROBE = "bench-probe"
_SETTLED_SHARE = 0.03
_SETTLE_TURN_S = 0.25
_SETTLE_TIMEOUT_S = 10.0


class Reading(NamedTuple):
    """What a server has used since its start: seconds of CPU time by name of thread, and engine totals."""

    cpu_s: dict[str, float]
    num_steps: int
    outside_s: float
    """Time on the clock of those steps that was not the model's nor choosing tokens."""

    def since(self, earlier: "Reading") -> "Reading":
        """Return what was used in between."""
        names = self.cpu_s.keys() | earlier.cpu_s.keys()
        used = {name: self.cpu_s.get(name, 0.0) - earlier.cpu_s.get(name, 0.0) for name in names}
        return Reading(used, self.num_steps - earlier.num_steps, self.outside_s - earlier.outside_s)

    @property
    def engine_s(self) -> float:
        """CPU time of the threads that compute steps."""
        return self.cpu_s.get(ENGINE, 0.0)

    @property
    def others_s(self) -> float:
        """CPU time of everything else in the server."""
        return sum(seconds for name, seconds in self.cpu_s.items() if name != ENGINE)


class ServerProbe:
    """Asks a server that has called `install`."""

    def __init__(self, pid: int) -> None:
        """Ask the server with this process id."""
        self._pid = pid

    def read(self) -> Reading:
        """Return what the server has used so far. Raises `OSError` if it is gone or cannot be probed."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_address(self._pid))
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        totals = json.loads(answer)
        cpu_s: dict[str, float] = {}
        for name, ns in self._threads():
            cpu_s[name] = cpu_s.get(name, 0.0) + ns / 1e9
        cpu_s[ENDED] = self._process_s() - sum(cpu_s.values())
        cpu_s.pop(_PROBE, None)
        return Reading(cpu_s, totals["num_steps"], totals["outside_ns"] / 1e9)

    def settle(self) -> None:
        """Return when the server has caught up with itself: uses next to no CPU time, or never will."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        used_s = self._process_s()
        while time.monotonic() < deadline:
            time.sleep(_SETTLE_TURN_S)
            before_s, used_s = used_s, self._process_s()
            if used_s - before_s < _SETTLED_SHARE * _SETTLE_TURN_S:
                return

    def _process_s(self) -> float:
        """Return the CPU time of the process, by the clock that Linux has for it (clock_getcpuclockid)."""
        return time.clock_gettime(~self._pid << 3 | 2)

    def _threads(self) -> list[tuple[str, int]]:
        """Return the threads that live: name without a number at its end, nanoseconds of CPU time."""
        found = []
        for folder in Path(f"/proc/{self._pid}/task").iterdir():
            try:
                name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
                ns = int((folder / "schedstat").read_text(encoding="ascii").split()[0])
            except OSError:  # ended meanwhile
                continue
            found.append((re.sub(r"[-_]?\d+$", "", name), ns))
        return found


# ---- in the server -------------------------------------------------------------------------------------


@dataclass
class _Totals:
    num_steps: int = 0
    outside_ns: int = 0


def install() -> None:
    """Let this process, a server to be, be probed: name its threads, count its steps, answer."""
    name_threads()
    totals = _Totals()
    _count_steps(totals)
    answering = socket.socket(socket.AF_UNIX)
    answering.bind(_address(os.getpid()))
    answering.listen()
    threading.Thread(target=_answer, args=(answering, totals), name=_PROBE, daemon=True).start()


def name_threads() -> None:
    """Give the kernel the names of this thread and of all that Python starts from now on."""
    _tell_name(threading.get_native_id(), LOOP)
    start = threading.Thread.start

    def start_with_name(thread: threading.Thread) -> None:
        start(thread)
        if thread.native_id is not None:  # without a name of its own it is "Thread-1 (its function)"
            _tell_name(thread.native_id, re.sub(r"Thread-\d+ \((\w+)\)", r"\1", thread.name))

    threading.Thread.start = start_with_name  # type: ignore[method-assign, assignment]


def _tell_name(thread_id: int, name: str) -> None:
    try:
        Path(f"/proc/self/task/{thread_id}/comm").write_text(name[:MAX_NAME_CHARS], encoding="utf-8")
    except OSError:  # it has ended already
        return


def _count_steps(totals: _Totals) -> None:
    # Imported here: who only asks a server needs none of it.
    from app.engine_thread import EngineThread  # noqa: PLC0415
    from engine.core import EngineCore  # noqa: PLC0415
    from engine.records import StepResult  # noqa: PLC0415

    turn, emit = EngineThread._turn, EngineThread._emit  # noqa: SLF001 - there is no other place to stand
    inside_ns: list[int] = []

    def timed_turn(thread: EngineThread, core: EngineCore) -> bool:
        was_busy = core.has_work  # else it begins with a wait for a request
        inside_ns.clear()
        started_ns = time.perf_counter_ns()
        goes_on = turn(thread, core)
        if was_busy and inside_ns:
            totals.num_steps += 1
            totals.outside_ns += time.perf_counter_ns() - started_ns - sum(inside_ns)
        return goes_on

    def noted_emit(thread: EngineThread, result: StepResult, error: str | None = None) -> None:
        inside_ns.append(result.record.forward_ns + result.record.sample_ns)
        emit(thread, result, error)

    EngineThread._turn = timed_turn  # type: ignore[method-assign, assignment]  # noqa: SLF001
    EngineThread._emit = noted_emit  # type: ignore[method-assign, assignment]  # noqa: SLF001


def _answer(answering: socket.socket, totals: _Totals) -> None:
    while True:
        connection, _ = answering.accept()
        with connection:
            connection.sendall(json.dumps(vars(totals)).encode())


def _address(pid: int) -> str:
    return f"\0pageglass-bench-{pid}"  # in no folder: gone with the process
