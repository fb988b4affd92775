"""The loads of `bench.policies`: slices of traces cut to what a small model can follow, and settings."""

import time
from collections import deque
from dataclasses import dataclass
from itertools import groupby

import msgspec

from app.load.synthetic import TokenSource
from app.load.traces import TraceRow, read_trace
from app.model_store import DEFAULT_MODEL, models_dir, resolve_model
from bench.common import ROOT
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.loading import LoadRequest, load_engine
from engine.records import StepRecord
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from engine.simulate.workload import SimulatedLoad, SimulatedRequest

VOCAB_SIZE = 49_152
"""Token ids that the default model knows."""

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
"""Taken in turn, so that the policy that goes by temperature has something to go by."""

NUM_HOST_BLOCKS = 1024
_NS_PER_S = 1e9
_IDLE_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Case:
    """A slice and how it is cut: lengths are divided, gaps between arrivals too (`speed`).

    The pool is small, so that blocks run out. The first `num_real` requests are run for real; costs are
    fitted to a run of others, `num_costs` from number `costs_from` on.
    """

    name: str
    file: str
    prompt_scale: float
    answer_scale: float
    speed: float
    num_blocks: int
    num_real: int
    costs_from: int
    num_costs: int

    def rows(self) -> list[TraceRow]:
        """Return all rows of the slice."""
        return read_trace(ROOT / "bench/data" / self.file, 10**6).rows

    def load(self, first: int = 0, count: int | None = None) -> SimulatedLoad:
        """Return the requests from number `first` on, that one at once; too long ones are left out."""
        rows = self.rows()[first:][:count]
        prompts = TokenSource(VOCAB_SIZE, 0, self.prompt_scale)
        answers = TokenSource(VOCAB_SIZE, 0, self.answer_scale)
        requests = []
        for index, row in enumerate(rows, start=first):
            num_answer = answers.num_output_tokens(row)
            if prompts.num_prompt_tokens(row) + num_answer > self.config().max_model_len:
                continue
            requests.append(
                SimulatedRequest(
                    request_id=str(index),
                    arrival_ns=round((row.arrival_s - rows[0].arrival_s) / self.speed * _NS_PER_S),
                    prompt=prompts.prompt(row, index),
                    max_tokens=num_answer,
                    temperature=TEMPERATURES[index % len(TEMPERATURES)],
                )
            )
        return SimulatedLoad(requests=requests)

    def config(self, preemption: str = "newest-first", mode: str = "recompute") -> EngineConfig:
        """Return the settings for a policy; without swapping there is no host tier."""
        return EngineConfig(
            num_blocks=self.num_blocks,
            max_model_len=2048,
            preemption=preemption,
            preemption_mode=mode,
            num_host_blocks=NUM_HOST_BLOCKS if mode == "swap" else 0,
        )

    def describe(self) -> str:
        """Return what the load is, in a sentence."""
        load = self.load()
        prompts = [len(request.prompt) for request in load.requests]
        answers = [request.max_tokens for request in load.requests]
        num_long = len(self.rows()) - len(prompts)
        return (
            f"{self.name}: {len(prompts)} requests ({num_long} of more than 2,048 tokens left out); prompts "
            f"divided by {self.prompt_scale:g} (mean {sum(prompts) / len(prompts):.0f} tokens), answers by "
            f"{self.answer_scale:g} (mean {sum(answers) / len(answers):.0f}); {self.speed:g} times as fast "
            f"as recorded; {self.num_blocks} blocks of 16 tokens."
        )


CASES = (
    Case(
        name="Azure conversation",
        file="azure-conv.csv",
        prompt_scale=4,
        answer_scale=4,
        speed=2.0,
        num_blocks=160,
        num_real=300,
        costs_from=300,
        num_costs=100,
    ),
    Case(
        name="Mooncake conversation",
        file="mooncake.jsonl",
        prompt_scale=32,
        answer_scale=4,
        speed=1.6,
        num_blocks=160,
        num_real=180,
        costs_from=200,
        num_costs=100,
    ),
)


class RealEngine:
    """The default model, loaded once; each run gets an engine of its own over it."""

    def __init__(self) -> None:
        """Load the model with room for the largest case."""
        config = msgspec.structs.replace(
            CASES[0].config(mode="swap"), num_blocks=max(case.num_blocks for case in CASES)
        )
        request = LoadRequest(
            model_path=resolve_model(DEFAULT_MODEL), config=config, cache_dir=models_dir() / ".converted"
        )
        loaded = load_engine(request, lambda _: None)
        self._runner = loaded.core.runner
        self._measured = loaded.core.config
        self.description = str(loaded.info)

    @property
    def copy_ns_per_block(self) -> float:
        """What copying a block takes, as measured when the model was loaded."""
        return self._measured.swap_ns_per_block

    def run(self, config: EngineConfig, load: SimulatedLoad) -> tuple[list[StepRecord], dict[str, int]]:
        """Run a load in real time; return its records and when each request was due, on the same clock."""
        self._runner.reset()
        config = msgspec.structs.replace(
            config,
            recompute_ns_per_token=self._measured.recompute_ns_per_token,
            swap_ns_per_block=self._measured.swap_ns_per_block,
        )
        core = EngineCore(config, self._runner, wall_ns=time.perf_counter_ns)
        groups = deque(
            list(group) for _, group in groupby(load.requests, key=lambda request: request.request_id)
        )
        started_ns = time.perf_counter_ns()
        records = []
        while groups or core.has_work:
            elapsed_ns = time.perf_counter_ns() - started_ns
            while groups and groups[0][0].arrival_ns <= elapsed_ns:
                core.add_requests([_real_request(request) for request in groups.popleft()])
            if core.has_work:
                records.append(core.step().record)
            else:
                time.sleep(_IDLE_S)
        return records, {request.request_id: started_ns + request.arrival_ns for request in load.requests}


def _real_request(request: SimulatedRequest) -> EngineRequest:
    return EngineRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt,
        sampling_params=SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=int(request.request_id),
            ignore_eos=True,
        ),
    )
