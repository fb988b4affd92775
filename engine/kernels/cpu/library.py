"""The native step as Python sees it: the functions of `api.h`, and one class around a model's handle.

`ctypes` lets go of the interpreter during each call, so a step runs beside the web server's thread.
"""

import ctypes
import weakref
from array import array
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_double, c_int32, c_int64, c_uint8, c_void_p
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, EngineInvariantError, KernelsUnavailableError
from engine.kernels.cpu.structs import PgBatch, PgConfig, PgError, PgTensor
from engine.model.config import ModelConfig

NUMBER_TYPES = {"q4": 0, "int8": 0, "bf16": 1, "fp32": 2}
"""What activations are multiplied as, by the number format of the weights."""

KV_TYPES = {"bf16": 0, "int8": 1}

PHASES = (
    "embedding", "norms", "qkv", "rotary", "attention", "rounding", "output", "gate_up", "down", "head",
    "sampling",
)  # fmt: skip
"""What a step consists of, in the order of `pg_phase_ns`: see there."""

_BAD_ARGUMENT, _OUT_OF_MEMORY = 1, 2

Array: TypeAlias = NDArray[Any]


class Storage(IntEnum):
    """How a tensor's numbers are stored in the file."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q8_0 = 5


class Kind(IntEnum):
    """How a weight is kept for multiplication."""

    Q4 = 0
    INT8 = 1
    BF16 = 2
    F32 = 3


class Linear(IntEnum):
    """The linear layers."""

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741 - the layer's name
    GATE_UP = 4
    DOWN = 5
    HEAD = 6
    EMBED = 7


class Vector(IntEnum):
    """The vectors."""

    ATTN_NORM = 0
    MLP_NORM = 1
    Q_NORM = 2
    K_NORM = 3
    Q_BIAS = 4
    K_BIAS = 5
    V_BIAS = 6
    O_BIAS = 7
    FINAL_NORM = 8


class Want(IntEnum):
    """Whether the successor of a sequence's last token is wanted, and how it is chosen."""

    NOTHING = 0
    GREEDY = 1
    DRAW = 2


@dataclass(frozen=True, kw_only=True)
class NativeSizes:
    """What a native model needs to know beside the model's own configuration.

    `dtype` is one of `NUMBER_TYPES`, `kv_dtype` one of `KV_TYPES`; sequences end at `num_positions`.
    """

    num_positions: int
    block_size: int
    num_blocks: int
    dtype: str
    kv_dtype: str
    num_threads: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in memory: `data` keeps the bytes alive, `rows` x `columns` numbers of `storage`.

    `rotary_heads` other than 0: rows of so many heads whose rotary pairs are neighbours.
    """

    data: Array
    storage: Storage
    rows: int
    columns: int
    rotary_heads: int = 0


@dataclass(slots=True)
class StepBatch:
    """One step, as `PgBatch` of `api.h` describes it: everything per sequence, in the same order.

    `token_ids` holds the scheduled tokens of all sequences one after the other, `tables` their block
    tables, which begin at `table_starts` (with the end behind the last).
    """

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    num_computed: "array[int]" = field(default_factory=lambda: array("i"))
    num_scheduled: "array[int]" = field(default_factory=lambda: array("i"))
    tables: "array[int]" = field(default_factory=lambda: array("i"))
    table_starts: "array[int]" = field(default_factory=lambda: array("i", (0,)))
    wants: bytearray = field(default_factory=bytearray)
    temperatures: "array[float]" = field(default_factory=lambda: array("f"))
    top_ks: "array[int]" = field(default_factory=lambda: array("i"))
    top_ps: "array[float]" = field(default_factory=lambda: array("d"))
    uniforms: "array[float]" = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step gives: next token ids (-1 none wanted, -2 no finite logit), durations in nanoseconds."""

    token_ids: list[int]
    forward_ns: int
    sample_ns: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine could do at most when it was measured.

    Arithmetic in 10^9 operations a second (a multiplication and an addition are two), memory in 10^9 bytes
    a second (a copied byte counts twice: read and written).
    """

    int8_gops: float
    bf16_gflops: float
    fp32_gflops: float
    read_gb_s: float
    copy_gb_s: float


class NativeLibrary:
    """A compiled library with the types of its functions."""

    def __init__(self, path: Path) -> None:
        """Load it; raises `KernelsUnavailableError` if it is not a library of this version."""
        try:
            self.functions = ctypes.CDLL(str(path))
            self._declare()
        except (OSError, AttributeError) as error:
            raise KernelsUnavailableError(
                f"The compiled kernels {path} cannot be loaded ({error}); remove the file."
            ) from error
        self.isa = str(self.functions.pg_isa().decode())

    def _declare(self) -> None:
        handle, error = c_void_p, POINTER(PgError)
        signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "pg_isa": (c_char_p, ()),
            "pg_create": (c_void_p, (POINTER(PgConfig), error)),
            "pg_destroy": (None, (handle,)),
            "pg_set_linear": (
                c_int32,
                (handle, c_int32, c_int32, c_int32, POINTER(PgTensor), c_int32, error),
            ),
            "pg_set_vector": (c_int32, (handle, c_int32, c_int32, POINTER(PgTensor), error)),
            "pg_set_rotary": (c_int32, (handle, c_void_p, c_void_p, error)),
            "pg_finish": (c_int32, (handle, error)),
            "pg_step": (c_int32, (handle, POINTER(PgBatch), error)),
            "pg_weight_bytes": (c_int64, (handle,)),
            "pg_kv_bytes_per_block": (c_int64, (POINTER(PgConfig),)),
            "pg_kv_bytes": (c_int64, (handle,)),
            "pg_kv_data": (c_void_p, (handle,)),
            "pg_phase_ns": (None, (handle, POINTER(c_int64))),
            "pg_measure_ceilings": (c_int32, (c_int32, POINTER(c_double), error)),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self.functions, name)
            function.restype, function.argtypes = result, arguments

    def kv_bytes_per_block(self, config: ModelConfig, sizes: NativeSizes) -> int:
        """Return the bytes of keys and values of one block over all layers."""
        return int(self.functions.pg_kv_bytes_per_block(byref(_make_config(config, sizes))))

    def measure_ceilings(self, num_threads: int) -> Ceilings:
        """Measure what this machine can do with these instructions and so many threads: about a second."""
        numbers, error = (c_double * len(fields(Ceilings)))(), PgError()
        _check(self.functions.pg_measure_ceilings(num_threads, numbers, byref(error)), error)
        return Ceilings(*numbers)


class NativeModel:
    """One model inside the library. One thread at a time may use it.

    Set all weights, then `finish`, then `step` as often as needed. Raises `MemoryError` where memory does
    not suffice and `EngineInvariantError` for arguments that the library refuses: those are made by the
    engine, so that is a bug.
    """

    def __init__(self, library: NativeLibrary, config: ModelConfig, sizes: NativeSizes) -> None:
        """Make an empty model."""
        self.isa = library.isa
        self.config = config
        self.sizes = sizes
        self._functions = library.functions
        self._error = PgError()
        handle = self._functions.pg_create(byref(_make_config(config, sizes)), byref(self._error))
        if handle is None:
            raise ConfigError(f"The native kernels cannot be set up: {_message_of(self._error)}.")
        self._handle = c_void_p(handle)
        self._finalizer = weakref.finalize(self, self._functions.pg_destroy, self._handle)

    def close(self) -> None:
        """Free everything; nothing else may be called afterwards."""
        self._finalizer()

    def set_linear(self, layer: int, which: Linear, kind: Kind, tensors: list[StoredTensor]) -> None:
        """Pack the weight of a linear layer; HEAD and EMBED belong to layer 0."""
        described = (PgTensor * len(tensors))(*map(_describe, tensors))
        self._call(self._functions.pg_set_linear, layer, int(which), int(kind), described, len(tensors))

    def set_vector(self, layer: int, which: Vector, values: StoredTensor) -> None:
        """Take in a norm or a bias (float32); the final norm belongs to layer 0."""
        self._call(self._functions.pg_set_vector, layer, int(which), byref(_describe(values)))

    def set_rotary(self, cosines: Array, sines: Array) -> None:
        """Take in the rotary table: (num_positions, head_dim / 2) float32 each."""
        shape = (self.sizes.num_positions, self.config.head_dim // 2)
        parts = [np.ascontiguousarray(part, dtype=np.float32) for part in (cosines, sines)]
        assert all(part.shape == shape for part in parts), "the rotary table has another shape"
        self._call(self._functions.pg_set_rotary, *(part.ctypes.data for part in parts))

    def finish(self) -> None:
        """Check that all weights are there and allocate the KV pool."""
        self._call(self._functions.pg_finish)

    def step(self, batch: StepBatch, logits: Array | None = None, *, all_logits: bool = False) -> StepOutput:
        """Compute one step: write the KV of all tokens, choose the tokens that are wanted.

        `logits`: float32 (wanted, vocab_size), or with `all_logits` (tokens, vocab_size), to be filled.
        """
        num_sequences = len(batch.num_scheduled)
        next_token_ids = array("i", bytes(4 * num_sequences))
        described = PgBatch(
            num_sequences=num_sequences,
            num_tokens=len(batch.token_ids),
            wants=_address_of_bytes(batch.wants),
            want_all_logits=int(all_logits),
            logits=None if logits is None else logits.ctypes.data,
            next_token_ids=next_token_ids.buffer_info()[0],
            **{name: getattr(batch, name).buffer_info()[0] for name in _ARRAYS},
        )
        self._call(self._functions.pg_step, byref(described))
        return StepOutput(next_token_ids.tolist(), described.forward_ns, described.sample_ns)

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return int(self._functions.pg_weight_bytes(self._live_handle()))

    @property
    def kv_bytes(self) -> int:
        """Size of the KV pool."""
        return int(self._functions.pg_kv_bytes(self._live_handle()))

    def phase_ns(self) -> dict[str, int]:
        """Return the nanoseconds that all steps so far spent in each of `PHASES`."""
        numbers = (c_int64 * len(PHASES))()
        self._functions.pg_phase_ns(self._live_handle(), numbers)
        return dict(zip(PHASES, numbers, strict=True))

    def view_kv(self) -> Array:
        """Return the KV pool, block after block, as bytes (kv_bytes) uint8, not copied. Valid until `close`.

        Another thread may use blocks that the step does not.
        """
        address = self._functions.pg_kv_data(self._live_handle())
        return np.ctypeslib.as_array((c_uint8 * self.kv_bytes).from_address(address))

    def _live_handle(self) -> c_void_p:
        if not self._finalizer.alive:
            raise EngineInvariantError("the native model is closed")
        return self._handle

    def _call(self, function: Callable[..., int], *arguments: Any) -> None:
        _check(function(self._live_handle(), *arguments, byref(self._error)), self._error)


_ARRAYS = (
    "token_ids", "num_computed", "num_scheduled", "tables", "table_starts", "temperatures", "top_ks",
    "top_ps", "uniforms",
)  # fmt: skip


def _make_config(config: ModelConfig, sizes: NativeSizes) -> PgConfig:
    return PgConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        num_positions=sizes.num_positions,
        block_size=sizes.block_size,
        num_blocks=sizes.num_blocks,
        kv_type=KV_TYPES[sizes.kv_dtype],
        number_type=NUMBER_TYPES[sizes.dtype],
        num_threads=sizes.num_threads,
        rms_norm_eps=config.rms_norm_eps,
    )


def _describe(tensor: StoredTensor) -> PgTensor:
    return PgTensor(
        data=tensor.data.ctypes.data,
        storage=int(tensor.storage),
        rows=tensor.rows,
        columns=tensor.columns,
        rotary_heads=tensor.rotary_heads,
    )


def _address_of_bytes(buffer: bytearray) -> int:
    return ctypes.addressof(c_char.from_buffer(buffer)) if buffer else 0


def _check(code: int, error: PgError) -> None:
    """Raise what a function's outcome stands for."""
    if code == _OUT_OF_MEMORY:
        raise MemoryError(_message_of(error))
    if code == _BAD_ARGUMENT:
        raise EngineInvariantError(f"the native kernels refuse an argument: {_message_of(error)}")
    if code != 0:
        raise RuntimeError(f"The native kernels failed: {_message_of(error)}")


def _message_of(error: PgError) -> str:
    message: bytes = error.message
    return message.decode(errors="replace")
