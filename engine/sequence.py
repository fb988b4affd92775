"""One generation inside the engine. Only the scheduler and the KV cache manager change it."""

from enum import IntEnum, StrEnum

import msgspec

from engine.sampling_params import SamplingParams


class SequenceStatus(IntEnum):
    """Where a sequence is. A preempted sequence is waiting again."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class FinishReason(StrEnum):
    """Why a sequence ended; each sequence gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is handed to the engine: one choice of one API request.

    Choices of the same request share `request_id` and differ in `choice_index`. `priority`: lower is more
    urgent; looked at under the policy "priority" only. `cache_salt` keeps
    prefix-cache sharing inside a group: only sequences with equal salts share blocks.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    choice_index: int = 0
    cache_salt: str | None = None
    priority: int = 0


class Sequence:
    """State of one generation.

    `token_ids` holds the prompt and then the generated tokens. `num_computed_tokens` of them have
    their KV in the blocks of `block_table` (block i holds tokens [i * block_size, (i + 1) *
    block_size)). `num_cached_tokens` of the prompt came from the prefix cache at the first admission.
    `slot` is a small number below max_num_seqs while running (it names the sequence's colour and
    row), -1 otherwise.

    `block_hashes` are the chained hashes of its full blocks, `block_tokens` their token ids as bytes.
    `prefix_hits` is the last result of the prefix lookup, good as long as nothing was evicted since
    `prefix_hits_epoch`; `awaited_hash` the block that it lets a running sequence compute.

    `due_ns` is its place in a queue by priority. It cannot be preempted while it has fewer than `safe_tokens`
    tokens, and holds all blocks for so many. `has_lookahead`: its last block was reserved ahead of need.
    `load_id` is that of the copy from the host tier that it waits for (0: none), `host_pins` the host blocks
    that are kept for it while it is preempted.
    """

    __slots__ = (
        "awaited_hash",
        "block_hashes",
        "block_table",
        "block_tokens",
        "cache_salt",
        "choice_index",
        "due_ns",
        "has_lookahead",
        "host_pins",
        "last_slot",
        "load_id",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "prefix_hits",
        "prefix_hits_epoch",
        "priority",
        "request_id",
        "safe_tokens",
        "sampling_params",
        "seq_id",
        "slot",
        "status",
        "token_ids",
    )

    def __init__(self, seq_id: int, request: EngineRequest, max_tokens: int, due_ns: int = 0) -> None:
        """Start a waiting sequence; `max_tokens` is what fits, at most what was asked."""
        self.seq_id = seq_id
        self.request_id = request.request_id
        self.choice_index = request.choice_index
        self.cache_salt = request.cache_salt
        self.sampling_params = request.sampling_params
        self.max_tokens = max_tokens
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.status = SequenceStatus.WAITING
        self.slot = -1
        self.last_slot = -1
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.block_tokens: list[bytes] = []
        self.prefix_hits: list[int] = []
        self.prefix_hits_epoch = 0
        self.awaited_hash: bytes | None = None
        self.priority = request.priority
        self.due_ns = due_ns
        self.safe_tokens = 0
        self.has_lookahead = False
        self.load_id = 0
        self.host_pins: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def max_num_tokens(self) -> int:
        """Most tokens that it can come to have."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    def __repr__(self) -> str:
        """Show what matters when a test fails."""
        return (
            f"Sequence({self.seq_id}, {self.status.name}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens}, blocks={self.block_table})"
        )
