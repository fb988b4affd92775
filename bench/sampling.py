"""How long choosing tokens takes: `python -m bench.sampling --threads 2`.

Draws from 64 rows of 49,152 random logits by the native kernels, for rows of several kinds and in several
ways, and prints the median milliseconds for all rows together, and in brackets the least, which what else the
machine does changes least. The median and the least of calls in which no row wants a token, made in turn with
the others, are taken off: that is what starting threads costs, which a step of the engine does not pay.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.common import Activity, add_quiet_option, print_disturbed, print_table, versions, wait_for_quiet
from engine.kernels.cpu.instruction_sets import runnable
from engine.kernels.cpu.library import NativeLibrary, Want
from engine.native_backend import open_library

Array = NDArray[Any]


class Way(NamedTuple):
    """How tokens are chosen."""

    want: Want = Want.DRAW
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


WAYS = {
    "greedy": Way(Want.GREEDY),
    "draw": Way(),
    "top-k 50": Way(top_k=50),
    "top-p 0.95": Way(top_p=0.95),
    "top-p 0.5": Way(top_p=0.5),
    "top-k 50, top-p 0.9": Way(top_k=50, top_p=0.9),
    "top-k 5,000, top-p 0.9": Way(top_k=5000, top_p=0.9),
}
_NOTHING = Way(Want.NOTHING)


def _zipf(rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    ranks = rng.random(shape).argsort(-1) + 1  # (rows, vocab_size) int64
    return rng.normal(size=shape) * 0.8 - 1.3 * np.log(ranks)


KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "like text: -1.3 log rank + N(0, 0.8)": _zipf,
    "N(0, 3)": lambda rng, shape: rng.normal(size=shape) * 3,
    "N(0, 1)": lambda rng, shape: rng.normal(size=shape),
    "nearly flat: N(0, 0.1)": lambda rng, shape: rng.normal(size=shape) * 0.1,
    "all equal": lambda _rng, shape: np.zeros(shape),
}
"""Logits (rows, vocab_size) by what they are like; standard deviations in nats."""


class Sampler:
    """`pg_sample` for the rows of one table of logits (rows, vocab_size) float32."""

    def __init__(self, library: NativeLibrary, logits: Array, threads: int) -> None:
        """Keep the table."""
        self._function = library.functions.pg_sample
        self._logits = np.ascontiguousarray(logits, dtype=np.float32)  # (rows, vocab_size) float32
        self._threads = threads
        self._rng = np.random.default_rng(1)

    def time_s(self, way: Way) -> float:
        """Choose a token of every row; return the seconds of the call. Raises `RuntimeError` if refused."""
        rows, vocab_size = self._logits.shape
        columns: list[Array] = [
            np.full(rows, value, dtype=dtype)
            for value, dtype in zip(way, ("u1", "f4", "i4", "f8"), strict=True)
        ]
        columns += [self._rng.random((rows,)), np.empty(rows, dtype=np.int32)]
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (self._logits, *columns)]
        message = ctypes.create_string_buffer(256)
        started = time.perf_counter()
        code = self._function(pointers[0], rows, vocab_size, *pointers[1:], self._threads, message)
        seconds = time.perf_counter() - started
        if code != 0:
            raise RuntimeError(message.value.decode())
        return seconds


def measure(sampler: Sampler, repeats: int) -> dict[str, tuple[float, float]]:
    """Return median and least milliseconds of each way, all ways in turn."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    idle: list[float] = []
    for _ in range(repeats):
        for name, way in WAYS.items():
            idle.append(sampler.time_s(_NOTHING))
            times[name].append(sampler.time_s(way))
    return {
        name: (
            (statistics.median(values) - statistics.median(idle)) * 1e3,
            (min(values) - min(idle)) * 1e3,
        )
        for name, values in times.items()
    }


def main() -> None:
    """Measure and print."""
    options = _parse()
    library = open_library(options.isa, lambda _: None)
    print(f"{versions()}, {library.isa}, {options.threads} threads, {options.rows} x {options.vocab} logits")
    rows: list[list[object]] = []
    for kind, make in KINDS.items():
        logits = make(np.random.default_rng(0), (options.rows, options.vocab))
        sampler = Sampler(library, logits, options.threads)
        wait_for_quiet(options.quiet_wait)
        activity = Activity()
        cells = [
            f"{median:.2f} ({least:.2f})" for median, least in measure(sampler, options.repeats).values()
        ]
        print_disturbed(kind, [activity.others()])
        rows.append([kind, *cells])
    print_table(["ms, median (least)", *WAYS], rows)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--vocab", type=int, default=49_152, help="logits a row (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=15, help="calls of each way (default: %(default)s)")
    present = runnable() or ("none",)
    parser.add_argument("--isa", choices=present, default=present[0], help="default: %(default)s")
    add_quiet_option(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
