"""Random lives of an engine, as hypothesis strategies: a failure is shrunk, and printed as a `Scenario`.

`run_scenario` lives one through and checks everything. For hours of it: `make fuzz`.
"""

import contextlib
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import dropwhile
from typing import Any

import click
import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from engine.config import PREEMPTION_MODES
from engine.core import EngineCore
from engine.errors import RequestError
from engine.records import FAILED_TOKEN_ID, Policies, StepResult
from engine.runner.base import ModelRunnerOutput
from engine.runner.fake import FakeRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.scheduling.preemption import PREEMPTION_POLICIES
from engine.scheduling.queue import QUEUE_POLICIES
from engine.sequence import EngineRequest, FinishReason, Sequence
from tests.builders import VOCAB_SIZE, make_config, solo_output
from tests.support.fuzz_checks import Auditor

STEP_NS = 10_000_000
"""Simulated time that a step takes."""

EOS_TOKEN_IDS = frozenset(range(0, VOCAB_SIZE, 40))
NO_SUCH_LOAD = 10**9


class InjectedError(Exception):
    """A model that fails."""


# ---------------------------------------------------------------------- what happens


@dataclass(frozen=True)
class Add:
    """A request for `n` answers to a prompt that shares `num_shared` tokens with others."""

    prefix: int
    num_shared: int
    suffix: int
    num_own: int
    max_tokens: int
    priority: int = 0
    temperature: float = 0.0
    n: int = 1
    cache_salt: str | None = None
    ignore_eos: bool = True

    def prompt(self, limit: int) -> list[int]:
        """Return its tokens, at most `limit`."""
        shared = [(331 * self.prefix + 7 * position) % VOCAB_SIZE for position in range(self.num_shared)]
        own = [(601 + 53 * self.suffix + position) % VOCAB_SIZE for position in range(self.num_own)]
        return (shared + own)[:limit]


@dataclass(frozen=True)
class End:
    """An open request is aborted, or one of its answers stopped; `of` is the state to choose from."""

    number: int
    of: str = "any"
    by_stop: bool = False


@dataclass(frozen=True)
class Steps:
    """So many steps, if there is work."""

    count: int = 1


@dataclass(frozen=True)
class Change:
    """Other policies."""

    policy: str
    preemption: str
    mode: str


@dataclass(frozen=True)
class Fail:
    """The next step fails: "before" or "after" computing, for "one" sequence, or for one's "chunk" alone."""

    how: str


Operation = Add | End | Steps | Change | Fail


def decode_operation(number: int) -> Operation:
    """Turn a number into an operation; small numbers are simple operations, so that failures shrink well."""
    kind, number = number % 32, number // 32

    def pick(*choices: Any) -> Any:
        nonlocal number
        number, index = divmod(number, len(choices))
        return choices[index]

    if kind < 10:
        return Steps(1 + kind % 6)
    if kind < 28:
        return Add(
            prefix=pick(0, 1, 2),
            num_shared=pick(*range(24)),
            suffix=pick(0, 1, 2, 3),
            num_own=pick(1, 2, 3, 5, 9),
            max_tokens=pick(2, 1, 4, 8, 12, 16, 20, 40, 80),
            priority=pick(0, -10, 10, 0),
            temperature=pick(0.0, 0.7, 1.0),
            n=pick(1, 1, 1, 1, 1, 1, 2, 3),
            cache_salt=pick(None, None, None, None, "a"),
            ignore_eos=pick(True, False),
        )
    if kind < 30:
        of = pick("any", "waiting", "running", "loading", "loading", "preempted")
        return End(pick(*range(16)), of, pick(False, False, True))
    if kind == 30:
        return Change(pick(*QUEUE_POLICIES), pick(*PREEMPTION_POLICIES), pick(*PREEMPTION_MODES))
    return Fail(pick("before", "after", "one", "chunk")) if pick(*range(6)) == 5 else Steps(6)


@dataclass(frozen=True)
class Scenario:
    """An engine and what happens to it."""

    settings: dict[str, Any]
    load_steps: int
    operations: list[Operation]

    def describe(self) -> str:
        """Return Python code that makes it; what is done to an idle engine at the beginning is left out."""
        operations = list(dropwhile(lambda operation: isinstance(operation, Steps | End), self.operations))
        lines = "".join(f"    {operation},\n" for operation in operations)
        return f"Scenario({self.settings},\n  {self.load_steps},\n  [\n{lines}  ],\n)"


SETTINGS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([4, 1, 2, 3, 4, 5, 8, 16]),
        "num_blocks": st.sampled_from([6, 7, 8, 9, 10, 12, 15, 20, 30, 40]),
        "max_num_seqs": st.sampled_from([3, 1, 2, 4, 5, 6, 8]),
        "max_num_batched_tokens": st.integers(8, 48),
        "max_model_len": st.sampled_from([64, 24, 96, 96]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "num_host_blocks": st.sampled_from([0, 40, 20, 6, 2]),
        "offload": st.booleans(),
        "preemption_mode": st.sampled_from(PREEMPTION_MODES),
        "policy": st.sampled_from(["fcfs", "priority", "priority"]),
        "preemption": st.sampled_from(PREEMPTION_POLICIES),
        "priority_ageing_s": st.sampled_from([1.0, 0.02, 0.005, 0.0]),
        "lookahead": st.booleans(),
        "preemption_quantum": st.integers(1, 16),
        "watermark": st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.4]),
        "swap_ns_per_block": st.sampled_from([0.0, 1.0, 100.0]),
        "recompute_ns_per_token": st.sampled_from([0.0, 1.0]),
    }
)


SLOW_COPIES: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 18,
    "max_num_seqs": 6,
    "max_model_len": 72,
    "enable_prefix_caching": True,
    "num_host_blocks": 40,
    "offload": True,
    "lookahead": True,
    "watermark": 0.0,
}
"""An engine on which loads outlast their deadline."""


def scenarios(num_operations: int, *, has_slow_copies: bool = False) -> st.SearchStrategy[Scenario]:
    """Return lives of at most so many operations."""
    operations = st.lists(
        st.integers(0, 2**36 - 1).map(decode_operation), min_size=num_operations // 4, max_size=num_operations
    )
    if has_slow_copies:
        settings = SETTINGS.map(lambda drawn: {**drawn, **SLOW_COPIES})
        return st.builds(Scenario, settings, st.just(70), operations)
    return st.builds(Scenario, SETTINGS, st.sampled_from([1, 2, 3, 8, 70]), operations)


# ---------------------------------------------------------------------- living it through


class UnreliableRunner(FakeRunner):
    """Fails when told to, and reports loads twice and loads that never were."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.failure = ""
        self._reported: list[int] = []

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        failure, self.failure = self.failure, ""
        if failure == "before":
            raise InjectedError
        failed = self._choose_failed(scheduler_output.scheduled, failure)
        # Without memory nothing of a sequence is computed: its keys and values stay what they were.
        scheduled = [entry for i, entry in enumerate(scheduler_output.scheduled) if i != failed]
        output = super().execute(replace(scheduler_output, scheduled=scheduled))
        if failure == "after":
            raise InjectedError
        token_ids = list(output.token_ids)
        if failed is not None:
            token_ids.insert(failed, FAILED_TOKEN_ID)
        finished = [*self._reported, NO_SUCH_LOAD, *output.finished_loads]
        self._reported = output.finished_loads
        return ModelRunnerOutput(token_ids, 0, 0, finished)

    def _choose_failed(self, scheduled: list[ScheduledSequence], failure: str) -> int | None:
        """Return which sequence fails alone: one that samples, or one in the middle of its prompt."""
        if failure not in ("one", "chunk"):
            return None
        samples = failure == "one"
        return next((i for i, entry in enumerate(scheduled) if entry.needs_sampling == samples), None)

    def reset(self) -> None:
        super().reset()
        self._reported = []


class Life:
    """One engine, one scenario, every check."""

    def __init__(self, scenario: Scenario) -> None:
        settings = dict(scenario.settings)
        if settings["num_host_blocks"] == 0 and settings["preemption_mode"] == "swap":
            settings["preemption_mode"] = "auto"
        config = make_config(**settings)
        self.runner = UnreliableRunner(
            config.num_blocks,
            config.block_size,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=EOS_TOKEN_IDS,
            load_steps=scenario.load_steps,
        )
        self.now_ns = 0
        self.core = EngineCore(config, self.runner, clock_ns=self._clock, wall_ns=self._clock)
        self.auditor = Auditor(self.core, self.runner)
        self.wanted: dict[str, Add] = {}

    def _clock(self) -> int:
        return self.now_ns

    def run(self, operations: list[Operation]) -> None:
        """Do one after the other, then step until nothing is left, and check the end."""
        for operation in operations:
            self._do(operation)
        while self.core.has_work:
            self._step()
            assert self.auditor.num_steps <= self.auditor.max_steps, "no end in sight"
        self._flush()
        self.auditor.check_end()
        self._check_answers()

    def _do(self, operation: Operation) -> None:
        match operation:
            case Add():
                self._add(operation)
            case End():
                self._end(operation)
            case Steps():
                for _ in range(operation.count):
                    self._step()
            case Change():
                mode = operation.mode if self.core.config.num_host_blocks else "recompute"
                self.core.set_policies(Policies(operation.policy, operation.preemption, mode))
            case Fail():
                self.runner.failure = operation.how
                self._step()
                self.runner.failure = ""

    def _step(self) -> None:
        self.now_ns += STEP_NS
        if not self.core.has_work:
            self._flush()
            return
        try:
            result = self.core.step()
        except InjectedError:
            result = self.core.fail_all("injected")
        self.auditor.take(result)

    def _flush(self) -> None:
        result: StepResult | None = self.core.flush()
        if result is not None:
            self.auditor.take(result)

    def _add(self, wanted: Add) -> None:
        request_id = f"q{len(self.wanted)}"
        params = SamplingParams(
            max_tokens=wanted.max_tokens, temperature=wanted.temperature, ignore_eos=wanted.ignore_eos
        )
        requests = [
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=wanted.prompt(self.core.config.max_model_len - 1),
                sampling_params=params,
                choice_index=index,
                cache_salt=wanted.cache_salt,
                priority=wanted.priority,
            )
            for index in range(wanted.n)
        ]
        with contextlib.suppress(RequestError):
            self.core.add_requests(requests)
            self.wanted[request_id] = wanted

    def _end(self, operation: End) -> None:
        state = self.core.scheduler.state
        open_ = [*state.running, *state.waiting]
        chosen = [sequence for sequence in open_ if _is_in(sequence, operation.of)] or open_
        if not chosen:
            return
        sequence = chosen[operation.number % len(chosen)]
        if operation.by_stop:
            self.core.stop(sequence.request_id, sequence.choice_index)
        else:
            self.core.abort(sequence.request_id)

    def _check_answers(self) -> None:
        """Each answer ended once, with the tokens of a solo run, or their beginning if it was cut short."""
        limit = self.core.config.max_model_len
        for request_id, wanted in self.wanted.items():
            prompt = wanted.prompt(limit - 1)
            expected = solo_output(prompt, min(wanted.max_tokens, limit - len(prompt)))
            ends = [index for index, token_id in enumerate(expected) if token_id in EOS_TOKEN_IDS]
            whole: str = FinishReason.LENGTH
            if ends and not wanted.ignore_eos:
                expected, whole = expected[: ends[0] + 1], FinishReason.STOP
            for index in range(wanted.n):
                tokens = self.auditor.tokens.get((request_id, index), [])
                (reason,) = self.auditor.reasons[request_id, index]
                assert tokens == expected[: len(tokens)]
                if len(tokens) == len(expected):
                    assert reason == whole
                else:
                    assert reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.STOP)


def _is_in(sequence: Sequence, state: str) -> bool:
    match state:
        case "waiting":
            return sequence.slot < 0 and not sequence.num_preemptions
        case "preempted":
            return sequence.slot < 0 and sequence.num_preemptions > 0
        case "loading":
            return sequence.load_id != 0
        case "running":
            return sequence.slot >= 0 and not sequence.load_id
    return True


def run_scenario(scenario: Scenario, tally: Counter[str] | None = None) -> None:
    """Live a scenario through; raises `AssertionError` where the engine does what it must not."""
    life = Life(scenario)
    life.run(scenario.operations)
    if tally is not None:
        tally.update(life.auditor.tally)
        tally["requests"] += len(life.wanted)
        tally["steps"] += life.auditor.num_steps


def run_many(
    num_scenarios: int, num_operations: int, *, seed: int | None = None, has_slow_copies: bool = False
) -> Counter[str]:
    """Live random scenarios through and count what happened; without a seed they are always the same."""
    tally: Counter[str] = Counter()

    @hypothesis.settings(
        max_examples=num_scenarios,
        derandomize=seed is None,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
        print_blob=False,
    )
    @hypothesis.given(scenarios(num_operations, has_slow_copies=has_slow_copies))
    def live(scenario: Scenario) -> None:
        hypothesis.note(scenario.describe())
        run_scenario(scenario, tally)

    (live if seed is None else hypothesis.seed(seed)(live))()
    return tally


@click.command()
@click.option("--hours", default=1.0, show_default=True, help="How long to go on; 0: one seed only.")
@click.option("--seed", default=0, show_default=True, help="The first seed; each next one is one more.")
@click.option("--operations", default=400, show_default=True, help="Most operations of a scenario.")
def main(hours: float, seed: int, operations: int) -> None:
    """Look for lives in which the scheduler is wrong; the first one is shrunk and printed."""
    ends_s = time.monotonic() + hours * 3600
    tally: Counter[str] = Counter()
    while True:
        try:
            tally += run_many(200, operations, seed=seed, has_slow_copies=seed % 4 == 3)
        except BaseException:
            again = f"python -m tests.support.fuzz --hours 0 --seed {seed} --operations {operations}"
            click.echo(f"Seed {seed} failed. Again: {again}", err=True)
            raise
        click.echo(f"seed {seed}: so far {tally['requests']} requests in {tally['steps']} steps")
        seed += 1
        if time.monotonic() >= ends_s:
            break
    for what, count in sorted(tally.items()):
        click.echo(f"{count:10} {what}")


if __name__ == "__main__":
    main()
