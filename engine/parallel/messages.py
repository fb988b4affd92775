"""What the processes of a model say to each other beside the sums of their tensors.

Rank 0 writes frames to each other rank's standard input: a length in four bytes, then a `RankSpec` and a
`PoolSpec` as JSON, and from then on one packed `StepInputs` for each step. The other way each rank has a pipe
of its own for reports, one line of JSON each. Nothing in either direction can name code to be run.
"""

import itertools
import os
import struct
from enum import StrEnum

import msgspec
import numpy as np

from engine.errors import EngineInvariantError
from engine.model.step import StepInputs

_LENGTH = struct.Struct("<I")
_HEADER_NUMBERS = 6


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank loads.

    `fingerprint` is that of the files that rank 0 has loaded (`engine.parallel.fingerprint`), `device` and
    `dtype` are torch's names, `backend` that of torch.distributed ("gloo", "nccl"), `attention` that of
    `engine.runner.arithmetic`. `num_threads`: threads of this rank on the CPU; 0 leaves torch's own number.
    It beats every `beat_s` seconds.
    """

    rank: int
    size: int
    model_path: str
    fingerprint: str
    device: str
    dtype: str
    backend: str
    attention: str
    num_threads: int
    beat_s: float
    log_level: int


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank makes once all have loaded: its part of the KV pool, and the connection to the others.

    `num_positions` are those that a sequence can have; the ranks find each other through `store_path`.
    """

    num_blocks: int
    block_size: int
    num_positions: int
    store_path: str


class Stage(StrEnum):
    """How far a rank is. `ready`: it has its pool and connects, or waits for steps."""

    STARTING = "starting"
    LOADING = "loading"
    LOADED = "loaded"
    READY = "ready"
    FAILED = "failed"


class RankReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sign of life; with a `stage` also news.

    `share`: of the weights, while loading. `message`: one line, why it failed.
    """

    stage: Stage | None = None
    share: float = 0.0
    message: str = ""


def write_frame(file_descriptor: int, payload: bytes | memoryview) -> None:
    """Write a frame; raises `BrokenPipeError` if nobody can read it any more."""
    for part in (_LENGTH.pack(len(payload)), payload):
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(file_descriptor, rest) :]


def read_frame(file_descriptor: int) -> bytearray | None:
    """Read a frame; None once the other side has closed."""
    length = _read_exactly(file_descriptor, _LENGTH.size)
    return None if length is None else _read_exactly(file_descriptor, *_LENGTH.unpack(length))


def _read_exactly(file_descriptor: int, count: int) -> bytearray | None:
    buffer = bytearray(count)
    rest = memoryview(buffer)
    while rest:
        num_read = os.readv(file_descriptor, [rest])
        if num_read == 0:
            return None
        rest = rest[num_read:]
    return buffer


def pack_inputs(inputs: StepInputs) -> memoryview:
    """Return a step as bytes: six sizes, then all arrays, as int32 in this machine's order."""
    num_sequences, width = inputs.block_tables.shape
    sizes = [len(inputs.input_ids), num_sequences, width, len(inputs.logits_rows)]
    header = np.array([*sizes, inputs.num_decodes, inputs.block_size], np.int32)  # (6)
    arrays = (
        header,
        inputs.input_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.query_starts,
        inputs.context_lens,
        inputs.block_tables.reshape(-1),
        inputs.logits_rows,
    )
    return np.concatenate(arrays).data.cast("B")


def unpack_inputs(frame: bytearray) -> StepInputs:
    """Return the step in a frame; its arrays are views of the frame."""
    numbers = np.frombuffer(frame, np.int32)  # (numbers) int32
    num_tokens, num_sequences, width, num_wanted, num_decodes, block_size = map(
        int, numbers[:_HEADER_NUMBERS]
    )
    sizes = [
        *(num_tokens, num_tokens, num_tokens),
        *(num_sequences + 1, num_sequences, num_sequences * width, num_wanted),
    ]
    if len(numbers) != _HEADER_NUMBERS + sum(sizes):
        raise EngineInvariantError(f"a step of {len(numbers)} numbers does not have the sizes it names")
    ends = np.cumsum([_HEADER_NUMBERS, *sizes])  # (8)
    ids, positions, slots, starts, contexts, tables, wanted = (
        numbers[begin:end] for begin, end in itertools.pairwise(ends)
    )
    return StepInputs(
        input_ids=ids,
        positions=positions,
        slot_mapping=slots,
        query_starts=starts,
        context_lens=contexts,
        block_tables=tables.reshape(num_sequences, width),
        logits_rows=wanted,
        num_decodes=num_decodes,
        block_size=block_size,
    )
