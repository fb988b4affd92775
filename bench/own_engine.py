"""Our engine in this process, running the cases of the workload."""

import argparse
import gc
import statistics
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from app.model_store import DEFAULT_MODEL, models_dir, resolve_model
from app.setting_values import parse_size
from bench.common import Figures
from bench.timing import Answer, figures_of
from bench.workload import Prompt, shared_prefix
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.loading import LoadedEngine, LoadRequest, load_engine
from engine.records import StepRecord
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest

CACHE_DIR = models_dir() / ".converted"
FULL_BATCH = 64
MAX_MODEL_LEN = 1024
DTYPES = ("auto", "q4", "int8", "bf16", "fp32")


@dataclass(frozen=True)
class EngineOptions:
    """How to load the engine; None leaves it to the engine."""

    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    threads: int | None = None
    kv_memory: str = "600MiB"
    kv_dtype: str | None = None
    kernels: str | None = None
    max_num_batched_tokens: int = EngineConfig().max_num_batched_tokens

    def arguments(self) -> list[str]:
        """Return the command-line options that say the same."""
        given = ((item.name.replace("_", "-"), getattr(self, item.name)) for item in fields(self))
        return [part for name, value in given if value is not None for part in (f"--{name}", str(value))]


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Let a command take the fields of `EngineOptions`."""
    group = parser.add_argument_group("our engine")
    default = EngineOptions()
    group.add_argument("--model", default=default.model, help="name or path (default: %(default)s)")
    group.add_argument("--dtype", choices=DTYPES, default=default.dtype, help="default: %(default)s")
    group.add_argument("--threads", type=int, help="threads of a step (default: all cores)")
    group.add_argument("--kv-memory", default=default.kv_memory, help="KV pool (default: %(default)s)")
    group.add_argument("--kv-dtype", help="number format of the KV pool (default: the engine's)")
    group.add_argument("--kernels", help="what runs the model (default: the best that works here)")
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=default.max_num_batched_tokens,
        help="token budget of a step (default: %(default)s)",
    )


def engine_options(arguments: argparse.Namespace) -> EngineOptions:
    """Return the options that `add_engine_options` took."""
    return EngineOptions(**{item.name: getattr(arguments, item.name) for item in fields(EngineOptions)})


def make_load_request(options: EngineOptions) -> LoadRequest:
    """Return what `load_engine` takes."""
    optional = {"kernels": options.kernels, "kv_dtype": options.kv_dtype}
    chosen: dict[str, Any] = {name: value for name, value in optional.items() if value is not None}
    return LoadRequest(
        model_path=resolve_model(options.model),
        config=EngineConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=FULL_BATCH,
            max_num_batched_tokens=options.max_num_batched_tokens,
        ),
        cache_dir=Path(CACHE_DIR),
        kv_memory_bytes=parse_size(options.kv_memory),
        dtype=options.dtype,
        num_threads=options.threads,
        **chosen,
    )


def load_as_served(options: EngineOptions) -> LoadedEngine:
    """Load, and keep the garbage collector away from what is loaded, as the server does."""
    loaded = load_engine(make_load_request(options), lambda _: None)
    gc.collect()
    gc.freeze()
    return loaded


@dataclass
class Steps:
    """The records of a run and how long each step took in all, in ns."""

    records: list[StepRecord]
    wall_ns: list[int]


class OwnEngine:
    """One loaded model; each run gets an engine of its own over it, so that no cache outlives a run."""

    def __init__(self, options: EngineOptions) -> None:
        """Load the model."""
        started_s = time.perf_counter()
        loaded = load_as_served(options)
        self._core = loaded.core
        self.load_s = time.perf_counter() - started_s
        self.description = str(loaded.info)

    def run(self, case: str, prompts: list[Prompt]) -> Figures:
        """Run one case to the end and return its figures, among them where the time went."""
        caching = case != "W3n"
        config = msgspec.structs.replace(self._core.config, enable_prefix_caching=caching)
        core = EngineCore(config, self._core.runner)
        if case == "W3w":
            drive(core, [shared_prefix(prompts)])
        started_s = time.perf_counter()
        answers, steps = drive(core, prompts)
        return {**figures_of(case, prompts, answers, started_s), **_split(steps)}


def drive(core: EngineCore, prompts: list[Prompt]) -> tuple[list[Answer], Steps]:
    """Run all prompts together and note when each token comes."""
    due_s = time.perf_counter()
    answers = [Answer(due_s) for _ in prompts]
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=prompt.num_new, temperature=0.0, ignore_eos=True)
        core.add_request(
            EngineRequest(request_id=str(number), prompt_token_ids=prompt.token_ids, sampling_params=params)
        )
    steps = Steps([], [])
    while core.has_work:
        started_ns = time.perf_counter_ns()
        result = core.step()
        ended_ns = time.perf_counter_ns()
        for output in result.outputs:
            if output.token_id >= 0:
                answer = answers[int(output.request_id)]
                answer.num_new += 1
                answer.pieces_s.append(ended_ns / 1e9)
        steps.records.append(result.record)
        steps.wall_ns.append(ended_ns - started_ns)
    return answers, steps


def _split(steps: Steps) -> Figures:
    """Return the number of steps and the share of their time that each part took."""
    total_ns = sum(steps.wall_ns)
    records = steps.records
    figures = {
        "steps": float(len(records)),
        "forward_percent": 100 * sum(record.forward_ns for record in records) / total_ns,
        "sample_percent": 100 * sum(record.sample_ns for record in records) / total_ns,
        "schedule_percent": 100 * sum(record.schedule_ns for record in records) / total_ns,
        "host_percent": 100 * sum(record.host_ns for record in records) / total_ns,
    }
    outside_ms = [
        (wall_ns - record.forward_ns - record.sample_ns) / 1e6
        for record, wall_ns in zip(records, steps.wall_ns, strict=True)
        if len(record.batch) == FULL_BATCH
    ]
    if outside_ms:
        figures["outside_model_mean_ms_at_64"] = statistics.mean(outside_ms)
        figures["outside_model_max_ms_at_64"] = max(outside_ms)
    return figures
