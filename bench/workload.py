"""The workload of the benchmarks: `python -m bench.workload [--write FILE] [--workload FILE]`.

Four cases, all greedy and to a fixed length, so that every engine does the same work:

  W1  one request: a prompt of 128 tokens, 128 new tokens
  W2  64 requests at once: prompts of 32 to 512 tokens, 16 to 256 new ones, uniform
  W3  32 requests: a common prefix of 512 tokens and 32 of their own, 64 new tokens
  W4  100 requests as in W2 that arrive one by one: exponential gaps of mean 1, divided by the rate

Each case has four variants: 0 warms up, 1 to 3 are measured. They have the same lengths but other text,
so that no prefix cache serves one run from another.

Where the workload comes from: the file named with --workload, else the file that the environment variable
PAGEGLASS_BENCH_WORKLOAD names, else it is made: token ids of the default model, cut from the questions of
MT-bench in app/data with a fixed seed, kept in the models folder. A file is JSON: for each of W1 to W4 a list
of four lists of {"prompt": [token ids], "n": new tokens}, and W4_unit_gaps, a number for each request of W4.
"""

import argparse
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from bench.common import ROOT, add_quiet_option, print_table

VARIABLE = "PAGEGLASS_BENCH_WORKLOAD"
CASES = ("W1", "W2", "W3n", "W3p", "W3w", "W4")
"""What can be run. W3n: without a prefix cache; W3p: with one that is empty at first; W3w: with one that
holds the common prefix already."""

NUM_VARIANTS = 4
SHARED_TOKENS = 512
"""Common prefix of W3."""

_SEED = 20_261_130
_PROMPT_TOKENS, _NEW_TOKENS = (32, 512), (16, 256)
_FIRST_TOKENS = 16
"""No two prompts begin with the same so many tokens: a block of a prefix cache."""


@dataclass(frozen=True)
class Prompt:
    """One request: token ids, and how many new tokens are wanted."""

    token_ids: list[int]
    num_new: int


@dataclass(frozen=True)
class Workload:
    """`variants[case]` for W1 to W4, and the gaps between the arrivals of W4 at rate 1."""

    variants: dict[str, list[list[Prompt]]]
    unit_gaps: list[float]

    def prompts(self, case: str, run: int, limit: int | None = None) -> list[Prompt]:
        """Return the requests of a measured run, 0 and up: variants 1 to 3 in turn; `limit` cuts them."""
        return self.variants[case[:2]][1 + run % (NUM_VARIANTS - 1)][:limit]

    def warm_up(self) -> list[Prompt]:
        """Return 16 short requests that no measured run repeats."""
        return [Prompt(prompt.token_ids, 8) for prompt in self.variants["W2"][0][:16]]

    def arrivals_s(self, rate: float) -> list[float]:
        """Return when the requests of W4 arrive, in seconds from the start, at `rate` requests a second."""
        return [elapsed / rate for elapsed in accumulate(self.unit_gaps)]


def shared_prefix(prompts: list[Prompt]) -> Prompt:
    """Return a request of the tokens that all prompts begin with, for one new token."""
    columns = zip(*(prompt.token_ids for prompt in prompts), strict=False)
    shared = takewhile(lambda column: len(set(column)) == 1, columns)
    return Prompt([column[0] for column in shared], 1)


def add_workload_option(parser: argparse.ArgumentParser) -> None:
    """Let a command take `--workload`."""
    parser.add_argument(
        "--workload", type=Path, default=None, help=f"workload file (default: {VARIABLE}, else it is made)"
    )


def add_run_options(parser: argparse.ArgumentParser, *, runs: int = 5) -> None:
    """Let a benchmark of a case take how often, how much of it, from which file, and where figures go."""
    parser.add_argument("--runs", type=int, default=runs, help="measured runs (default: %(default)s)")
    parser.add_argument("--requests", type=int, help="only the first so many requests of the case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file, too")
    add_quiet_option(parser)
    add_workload_option(parser)


def load_workload(path: Path | None) -> Workload:
    """Return the workload of a file, of `PAGEGLASS_BENCH_WORKLOAD`, or the one that is made."""
    if path is None and os.environ.get(VARIABLE):
        path = Path(os.environ[VARIABLE])
    return parse_workload(json.loads((path or made_workload()).read_text(encoding="utf-8")))


def parse_workload(document: dict[str, Any]) -> Workload:
    """Return the workload that a JSON document describes."""
    variants = {
        case: [[Prompt(entry["prompt"], entry["n"]) for entry in variant] for variant in document[case]]
        for case in ("W1", "W2", "W3", "W4")
    }
    return Workload(variants, document["W4_unit_gaps"])


def made_workload() -> Path:
    """Return the file of the workload that is made, making it if it is not there."""
    # Imported here: only this needs the project, and other programs' Python reads workloads too.
    from app.model_store import DEFAULT_MODEL, models_dir, resolve_model  # noqa: PLC0415
    from engine.model.check import open_model  # noqa: PLC0415
    from engine.model.tokenizer_store import load_tokenizer  # noqa: PLC0415

    target = models_dir() / ".converted" / f"bench-workload-{_SEED}.json"
    if not target.is_file():
        tokenizer = load_tokenizer(open_model(resolve_model(DEFAULT_MODEL)), models_dir() / ".converted")
        turns = [tokenizer.encode(text) for text in _read_turns()]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(make_workload(turns)), encoding="utf-8")
    return target


def _read_turns() -> Iterator[str]:
    for line in (ROOT / "app/data/mt-bench.jsonl").read_text(encoding="utf-8").splitlines():
        yield from json.loads(line)["turns"]


def make_workload(turns: list[list[int]]) -> dict[str, Any]:
    """Return a workload document whose prompts are cut from `turns`, lists of token ids."""
    lengths = random.Random(_SEED)
    cutter = _Cutter(turns)
    mixed = {
        "W2": [_mixed_lengths(lengths) for _ in range(64)],
        "W4": [_mixed_lengths(lengths) for _ in range(100)],
    }
    document: dict[str, Any] = {case: [] for case in ("W1", "W2", "W3", "W4")}
    for _ in range(NUM_VARIANTS):
        document["W1"].append([{"prompt": cutter.cut(128), "n": 128}])
        for case, sizes in mixed.items():
            document[case].append([{"prompt": cutter.cut(size), "n": new} for size, new in sizes])
        prefix = cutter.cut(SHARED_TOKENS)
        document["W3"].append([{"prompt": prefix + cutter.cut(32), "n": 64} for _ in range(32)])
    document["W4_unit_gaps"] = [lengths.expovariate(1.0) for _ in range(100)]
    return document


def _mixed_lengths(generator: random.Random) -> tuple[int, int]:
    return generator.randint(*_PROMPT_TOKENS), generator.randint(*_NEW_TOKENS)


class _Cutter:
    """Cuts prompts from texts that it strings together in another order each time."""

    def __init__(self, turns: list[list[int]]) -> None:
        self._turns = turns
        self._random = random.Random(_SEED + 1)
        self._beginnings: set[tuple[int, ...]] = set()

    def cut(self, num_tokens: int) -> list[int]:
        """Return so many tokens, beginning as nothing before."""
        while True:
            tokens: list[int] = []
            while len(tokens) < 2 * num_tokens + 64:
                tokens += self._random.choice(self._turns)
            start = self._random.randrange(64)
            tokens = tokens[start : start + num_tokens]
            beginning = tuple(tokens[:_FIRST_TOKENS])
            if beginning not in self._beginnings:
                self._beginnings.add(beginning)
                return tokens


def main() -> None:
    """Show the workload, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_workload_option(parser)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the workload that is made here")
    options = parser.parse_args()
    if options.write is not None:
        options.write.write_bytes(made_workload().read_bytes())
    workload = load_workload(options.write or options.workload)
    rows: list[list[object]] = []
    for case, variants in workload.variants.items():
        prompts = variants[1]
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        rows.append([case, len(variants), len(prompts), num_tokens, sum(p.num_new for p in prompts)])
    print_table(["case", "variants", "requests", "prompt tokens", "new tokens"], rows)


if __name__ == "__main__":
    main()
