"""From the records of a session to a load that can be simulated, without any text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.records import Arrived, Finished, Policies, RecordKind, Rejected, StepRecord
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason
from engine.simulate.chains import UNKNOWN, BlockChains
from engine.simulate.costs import measured_ns
from engine.simulate.workload import Ending, SimulatedLoad, SimulatedRequest, make_tokens

_DEFAULT_TEMPERATURE = SamplingParams().temperature


@dataclass(slots=True)
class _Life:
    """What is known of one sequence."""

    arrived: Arrived
    arrival_ns: int
    reason: str | None = None
    num_output_tokens: int = 0
    ended_ns: int | None = None
    is_ended_by_step: bool = False


class SessionLoad:
    """Takes the records of a session one by one, then gives its load.

    `num_left_out` counts requests of which the end is not known, since steps are missing; `num_rejected`
    those that the engine refused, of which the lengths are not known; `num_failed` those that failed, which a
    simulation cannot: they leave at that moment.
    """

    def __init__(self, config: EngineConfig, temperatures: Mapping[str, float] | None = None) -> None:
        """`temperatures` by request id, where they differ from the default; records do not hold them."""
        self.num_left_out = 0
        self.num_rejected = 0
        self.num_failed = 0
        self._config = config
        self._temperatures = temperatures or {}
        self._chains = BlockChains(config)
        self._lives: dict[int, _Life] = {}
        self._done: list[_Life] = []
        self._policies: list[tuple[int, Policies]] = []
        self._previous_step = 0
        self._now_ns = 0

    def add(self, record: StepRecord) -> None:
        """Take the next record."""
        if record.step != self._previous_step + 1:
            self.num_left_out += len(self._lives)
            self._lives.clear()
            self._chains.forget_blocks()
        self._previous_step = record.step
        self._now_ns = min(self._now_ns, record.t_ns)  # durations come from another clock than moments
        self._chains.add(record)
        sampled = {entry.seq_id for entry in record.batch if entry.token_id >= 0}
        for event in record.events:
            if isinstance(event, Arrived):
                # Never earlier than what came before it: the order is what decisions depend on.
                self._now_ns = max(self._now_ns, event.t_ns)
                self._lives[event.seq_id] = _Life(event, self._now_ns)
            elif isinstance(event, Finished):
                self._end(event, sampled)
            elif isinstance(event, Policies):
                self._policies.append((self._now_ns, event))
            elif isinstance(event, Rejected):
                self.num_rejected += 1
        ended_ns = record.t_ns + (measured_ns(record) if record.kind == RecordKind.STEP else 0)
        self._now_ns = max(self._now_ns, ended_ns)

    def _end(self, event: Finished, sampled: set[int]) -> None:
        life = self._lives.pop(event.seq_id, None)
        if life is not None:
            self.num_failed += event.reason == FinishReason.ERROR
            life.reason, life.num_output_tokens = event.reason, event.num_output_tokens
            life.ended_ns, life.is_ended_by_step = self._now_ns, event.seq_id in sampled
            self._done.append(life)

    @property
    def num_guesses(self) -> int:
        """Blocks of which the content is only likely."""
        return self._chains.num_guesses

    @property
    def num_open(self) -> int:
        """Requests that had not ended by the last record."""
        return len(self._lives)

    def load(self, *, exact: bool = False) -> SimulatedLoad:
        """Return the requests, with arrivals in Unix ns.

        Whoever ended because of its text ends after the same number of tokens, or, with `exact`, at the
        recorded moment; requests that have not ended leave at the end.
        """
        open_lives = list(self._lives.values())
        for life in open_lives:
            life.reason, life.ended_ns = FinishReason.ABORT, self._now_ns
        lives = sorted([*self._done, *open_lives], key=lambda life: life.arrived.seq_id)
        requests = [self._make_request(life, exact=exact) for life in lives]
        return SimulatedLoad(requests=requests, policies=list(self._policies))

    def _make_request(self, life: _Life, *, exact: bool) -> SimulatedRequest:
        arrived, ending = life.arrived, _ending_of(life)
        num_prompt = arrived.num_prompt_tokens
        tokens = self._make_tokens(arrived.seq_id, num_prompt + life.num_output_tokens)
        has_moment = ending is Ending.CLIENT or (exact and ending is Ending.TEXT)
        return SimulatedRequest(
            request_id=arrived.request_id,
            arrival_ns=life.arrival_ns,
            prompt=tokens[:num_prompt],
            answer=tokens[num_prompt:],
            max_tokens=arrived.max_tokens,
            choice_index=arrived.choice_index,
            priority=arrived.priority,
            temperature=self._temperatures.get(arrived.request_id, _DEFAULT_TEMPERATURE),
            ending=ending,
            num_output_tokens=life.num_output_tokens,
            leave_ns=life.ended_ns if has_moment else None,
        )

    def _make_tokens(self, seq_id: int, num_tokens: int) -> list[int]:
        """Return tokens with the sharing that was recorded: those of a block are made from its hash."""
        block_size = self._config.block_size
        chain = self._chains.by_sequence.get(seq_id, [])
        tokens: list[int] = []
        for index in range(-(-num_tokens // block_size)):
            block_hash = chain[index] if index < len(chain) else UNKNOWN
            name = f"sequence {seq_id} block {index}" if block_hash == UNKNOWN else f"hash {block_hash}"
            tokens += make_tokens(name, block_size)
        return tokens[:num_tokens]


def read_session(
    records: Iterable[StepRecord],
    config: EngineConfig,
    temperatures: Mapping[str, float] | None = None,
    *,
    exact: bool = False,
) -> SimulatedLoad:
    """Return the load of a session; see `SessionLoad`."""
    session = SessionLoad(config, temperatures)
    for record in records:
        session.add(record)
    return session.load(exact=exact)


def _ending_of(life: _Life) -> Ending:
    if life.reason == FinishReason.LENGTH:
        return Ending.LENGTH
    if life.reason == FinishReason.STOP:
        return Ending.MODEL if life.is_ended_by_step else Ending.TEXT
    return Ending.CLIENT
