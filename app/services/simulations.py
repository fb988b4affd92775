"""Compares what settings would do to a load, a session or a trace: each variant is simulated once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from app.history.session_file import SessionFile
from app.load.files import LoadError
from app.load.sources import DEFAULT_SCALE
from app.load.synthetic import TokenSource
from app.load.traces import Trace
from app.services.simulation_settings import Changes, apply_changes, show_changes
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.records import Policies
from engine.simulate.costs import CostFit, StepCosts
from engine.simulate.figures import Figures, Measurement
from engine.simulate.pace import ReckonedPace
from engine.simulate.session import SessionLoad
from engine.simulate.simulation import simulate
from engine.simulate.workload import VOCAB_SIZE, SimulatedLoad, SimulatedRequest

DEFAULT_CONFIG: Final = EngineConfig(num_blocks=2912, max_model_len=8192)
"""What `pageglass serve` makes of the default model and 1 GiB of KV cache."""

DEFAULT_COSTS: Final = StepCosts(
    step_ns=3.3e6,
    prefill_token_ns=3.8e5,
    decode_token_ns=6.2e5,
    context_token_ns=600.0,
    prefill_pair_ns=200.0,
)
"""Of the default model on two Zen 4 cores; within 8 % of W1 and W2 in docs/performance.md."""

DEFAULT_COPY_NS: Final = 15_000.0
"""What copying a block of the default model takes there, in ns."""

_NS_PER_S = 1e9

_ANY_NUMBER = 2**20
"""The highest `max_waiting` that there is."""

_MEASURED = ("recompute_ns_per_token", "swap_ns_per_block")
"""Settings that come from the costs where a session does not have them."""

OnProgress = Callable[[str], None]
"""Called often, with how far it is in words."""


class Run(msgspec.Struct, frozen=True):
    """What one variant came to; `config` is None for the recording itself."""

    name: str
    figures: Figures
    changes: Changes
    config: EngineConfig | None = None


class Comparison(msgspec.Struct, frozen=True):
    """All runs of one load. `notes` say what is not as it was in reality."""

    source: str
    costs: StepCosts
    costs_source: str
    notes: list[str]
    runs: list[Run]


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a step and where they come from."""

    values: StepCosts
    source: str


BUILT_IN_COSTS: Final = Costs(
    values=DEFAULT_COSTS, source="built in: the default model (smollm2-135m-instruct) on two cores"
)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a load is changed before it is simulated. `limit`: its first requests only."""

    limit: int | None = None
    speed: float = 1.0

    @property
    def is_as_recorded(self) -> bool:
        """Whether nothing is changed."""
        return self.limit is None and self.speed == 1.0

    def apply(self, load: SimulatedLoad) -> SimulatedLoad:
        """Return the changed load."""
        return load.first(self.limit).at_speed(self.speed) if not self.is_as_recorded else load


@dataclass(frozen=True, kw_only=True)
class Source:
    """A load ready to be simulated. `measured` are the figures of its recording, where there is one."""

    name: str
    load: SimulatedLoad
    config: EngineConfig
    costs: Costs
    measured: Figures | None = None
    notes: list[str] = field(default_factory=list)
    counts_from_arrival: bool = True


def read_costs(session: SessionFile, on_progress: OnProgress) -> Costs:
    """Fit costs to a session; raises `ConfigError` if it has too few steps."""
    fit = CostFit()
    for record in session.records():
        fit.add(record)
        on_progress(f"reading session {session.id}: step {record.step:,} of {session.last_step:,}")
    return _fit(fit, session)


def read_session(
    session: SessionFile, options: LoadOptions, costs: Costs | None, on_progress: OnProgress
) -> Source:
    """Return a recorded session as a load, with costs of its own unless some are given.

    Any number of requests may wait: those that were refused are not simulated, so a limit would meet others.
    Raises `ConfigError` where it has too few steps to fit costs to, or no request.
    """
    fit, measurement = CostFit(), Measurement()
    recorded = SessionLoad(session.config, session.temperatures)
    for record in session.records():
        for part in (fit, measurement, recorded):
            part.add(record)
        on_progress(f"reading session {session.id}: step {record.step:,} of {session.last_step:,}")
    load = recorded.load()
    if not load.requests:
        raise ConfigError(f"Session {session.id} has no request that could be simulated.")
    return Source(
        name=f"session {session.id} ({session.model})",
        load=options.apply(load),
        config=msgspec.structs.replace(session.config, max_waiting=_ANY_NUMBER),
        costs=costs or _fit(fit, session),
        measured=measurement.figures() if options.is_as_recorded else None,
        notes=[*_notes_on(recorded, session), *_notes_on_options(options)],
        counts_from_arrival=False,
    )


def make_source(
    trace: Trace,
    name: str,
    options: LoadOptions,
    *,
    config: EngineConfig,
    costs: Costs,
    scale: float | None = None,
) -> Source:
    """Return a trace as a load; `scale` divides its lengths (None: 1 for Azure, 32 for Mooncake).

    Requests without prompt or answer, and those that do not fit, are left out and noted. Raises `LoadError`
    if none is left.
    """
    scale = scale or DEFAULT_SCALE[trace.format]
    tokens = TokenSource(VOCAB_SIZE, 0, scale)
    requests = []
    rows = trace.rows[: options.limit]
    num_empty = sum(not (row.num_prompt_tokens and row.num_output_tokens) for row in rows)
    for index, row in enumerate(rows):
        if not (row.num_prompt_tokens and row.num_output_tokens):
            continue
        num_output = tokens.num_output_tokens(row)
        if tokens.num_prompt_tokens(row) + num_output <= config.max_model_len:
            requests.append(
                SimulatedRequest(
                    request_id=str(index),
                    arrival_ns=round(row.arrival_s * _NS_PER_S),
                    prompt=tokens.prompt(row, index),
                    max_tokens=num_output,
                    num_output_tokens=num_output,
                )
            )
    if num_empty == len(rows):
        raise LoadError(f"{name}: no request has a prompt and an answer; their lengths are 0.")
    if not requests:
        raise LoadError(f"{name}: no request fits into {config.max_model_len} tokens; give a larger --scale.")
    notes = _notes_on_options(options)
    if scale != 1:
        notes.append(f"The lengths of the trace are divided by {scale:g}.")
    if num_empty:
        notes.append(f"{num_empty} requests with a length of 0 are left out.")
    if num_too_long := len(rows) - num_empty - len(requests):
        notes.append(f"{num_too_long} requests longer than {config.max_model_len} tokens are left out.")
    load = SimulatedLoad(requests=requests).at_speed(options.speed)
    return Source(name=name, load=load, config=config, costs=costs, notes=notes)


def compare(source: Source, variants: list[Changes], on_progress: OnProgress = lambda _: None) -> Comparison:
    """Simulate the load with its own settings and with each variant.

    Raises `ConfigError`, before anything is simulated, for settings that cannot work.
    """
    plans = []
    for changes in [Changes(), *variants]:
        config = apply_changes(_with_speeds(source), changes)
        plans.append((changes, config, _with_policies(source.load, changes, config)))
    runs = []
    if source.measured is not None:
        runs.append(Run("recorded", source.measured, Changes()))
    for number, (changes, config, load) in enumerate(plans, start=1):
        title = show_changes(changes) or "simulated"

        def report(share: float, num_steps: int, prefix: str = f"{number} of {len(plans)}, {title}") -> None:
            on_progress(f"{prefix}: {share:.0%} of the requests, {num_steps:,} steps")

        figures = simulate(
            config,
            load,
            ReckonedPace(source.costs.values, copy_ns_per_block=config.swap_ns_per_block),
            counts_from_arrival=source.counts_from_arrival,
            on_progress=report,
        )
        runs.append(Run(title, figures, changes, config))
    return Comparison(source.name, source.costs.values, source.costs.source, source.notes, runs)


def errors_percent(comparison: Comparison) -> dict[str, float]:
    """Return how far the simulation as recorded is from the recording: TTFT and throughput, in percent."""
    if len(comparison.runs) < 2 or comparison.runs[0].config is not None:
        return {}
    recorded, simulated = (msgspec.structs.asdict(run.figures) for run in comparison.runs[:2])
    return {
        name: 100 * (simulated[name] / recorded[name] - 1)
        for name in ("ttft_mean_ms", "output_tok_s")
        if recorded[name] and simulated[name] is not None
    }


def _fit(fit: CostFit, session: SessionFile) -> Costs:
    try:
        values = fit.fit()
    except ConfigError as error:
        raise ConfigError(f"Session {session.id}: {error} Give another session with --costs.") from error
    return Costs(values=values, source=f"fitted to {fit.num_steps:,} steps of session {session.id}")


def _with_speeds(source: Source) -> EngineConfig:
    """Return the settings with the speeds that the choice between the ways of preemption needs."""
    config, missing = source.config, dict[str, Any]()
    if config.recompute_ns_per_token == 0:
        missing["recompute_ns_per_token"] = source.costs.values.prefill_token_ns
    if config.swap_ns_per_block == 0:
        missing["swap_ns_per_block"] = source.costs.values.copied_block_ns or DEFAULT_COPY_NS
    return msgspec.structs.replace(config, **missing)


def _with_policies(load: SimulatedLoad, changes: Changes, config: EngineConfig) -> SimulatedLoad:
    """Return the load with the changed policies in force all the time; `ConfigError` if it cannot run so."""
    load = load.with_policies({name: changes[name] for name in Policies.__struct_fields__ if name in changes})
    for _, policies in load.policies:
        names = msgspec.structs.asdict(policies)
        try:
            msgspec.structs.replace(config, **names).validate()
        except ConfigError as error:
            raise ConfigError(
                f"On the way the session went over to {show_changes(names)}, which does not go together with "
                f"--set {show_changes(changes)}: {error} Set the policies, too."
            ) from error
    return load


def notes_on_version(session: SessionFile) -> list[str]:
    """Return what to know of a session that was recorded before some of the settings were there."""
    missing = {name: getattr(session.config, name) for name in session.missing if name not in _MEASURED}
    if not missing:
        return []
    shown = show_changes(missing)
    return [f"Session {session.id} is of an older version, without these settings; simulated with {shown}."]


def _notes_on(recorded: SessionLoad, session: SessionFile) -> list[str]:
    notes = notes_on_version(session)
    if session.first_step > 1:
        notes.append(f"Steps before {session.first_step:,} are not recorded any more.")
    if recorded.num_left_out:
        notes.append(f"{recorded.num_left_out} requests are left out: steps of theirs are not recorded.")
    if recorded.num_rejected:
        notes.append(
            f"{recorded.num_rejected} rejected requests are left out: their lengths are not known. "
            "Of the others any number may wait, unless max_waiting is set."
        )
    if recorded.num_failed:
        notes.append(
            f"{recorded.num_failed} requests failed: in simulations they leave at that moment, as aborted."
        )
    if recorded.num_open:
        notes.append(
            f"{recorded.num_open} requests were open where the records end: in simulations they leave then, "
            "as aborted."
        )
    if recorded.num_guesses:
        notes.append(f"Of {recorded.num_guesses} blocks it is only likely with which others they agreed.")
    if not session.config.enable_prefix_caching:
        notes.append("The prefix cache was off, so which requests shared a beginning is not known.")
    return notes


def _notes_on_options(options: LoadOptions) -> list[str]:
    notes = []
    if options.limit is not None:
        notes.append(f"Only the first {options.limit} requests are simulated.")
    if options.speed != 1:
        how = f"{options.speed:g} times faster" if options.speed else "all at once"
        notes.append(f"Requests arrive {how}.")
    return notes
