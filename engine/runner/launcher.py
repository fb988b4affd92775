"""Queues what a GPU computes: arrays up, block tables, forward, sampling, tokens back."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.attention import KVCache
from engine.model.decoder import Decoder
from engine.model.sampler import UNDECIDED_TOKEN_ID, DrawTensors, choose, decide
from engine.model.step import ForwardBatch
from engine.runner.cuda_graphs import DecodeGraphs, find_bucket
from engine.runner.device import Device, Event
from engine.runner.device_tables import DeviceTables
from engine.runner.shares import NO_SLOT, Launch, Share, make_launch
from engine.runner.staging import Staging, padded_bytes

_MAX_CHANGES = 1 << 16
"""Changes of block tables that go with a step; more go before it."""

_NUM_RESULTS = 8
"""More than there are launches whose tokens have not been read."""


@dataclass(frozen=True, slots=True)
class LaunchSizes:
    """The most that one launch computes."""

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int
    block_size: int


class PendingTokens:
    """The tokens of a launch, which the device may still be computing: one for each share of `wanted`."""

    def __init__(self, launch: Launch, result: Tensor, event: Event, drawn_logits: list[Tensor]) -> None:
        """`result` (wanted) int64 on the host is right once `event` has happened.

        Then, if top-k or top-p filter some of its draws, `drawn_logits` holds the logits (draws, vocab_size)
        of all that are drawn.
        """
        self.wanted = launch.wanted
        self.undecided: set[int] = set()
        """Sequences whose token `settle` had to decide: the device went on from another one."""
        self._drawn = [] if launch.draws is None else [launch.wanted[row] for row in launch.draws.rows]
        self._result = result
        self._event = event
        self._drawn_logits = drawn_logits
        self._token_ids: list[int] | None = None

    def wait(self) -> list[int]:
        """Return the token ids as `choose` gives them; keeps them, so that the buffer may be used again."""
        if self._token_ids is None:
            self._event.wait()
            self._token_ids = self._result.tolist()
        return self._token_ids

    def settle(self, seq_ids: Container[int]) -> dict[int, int]:
        """Return the tokens of some sequences; finds those that the candidates did not decide."""
        sampled = {
            share.sequence.seq_id: token_id
            for share, token_id in zip(self.wanted, self.wait(), strict=True)
            if share.sequence.seq_id in seq_ids
        }
        self.undecided = {seq_id for seq_id, token_id in sampled.items() if token_id == UNDECIDED_TOKEN_ID}
        if self.undecided:
            rows = [row for row, share in enumerate(self._drawn) if share.sequence.seq_id in self.undecided]
            (logits,) = self._drawn_logits
            some = logits.index_select(0, torch.tensor(rows, device=logits.device))  # (rows, vocab_size)
            shares = [self._drawn[row] for row in rows]
            decided = decide(some, [share.make_draw() for share in shares])
            sampled.update(zip((share.sequence.seq_id for share in shares), decided, strict=True))
        return sampled


class Launcher:
    """The device's side of a runner: block tables, newest tokens, buffers, graphs. Waits for nothing."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        device: Device,
        sizes: LaunchSizes,
        *,
        captures_graphs: bool = True,
    ) -> None:
        """Allocate what launches need beside weights and KV pool; without graphs all is launched anew."""
        self._decoder = decoder
        self._cache = cache
        self._device = device
        self._sizes = sizes
        num_slots = sizes.max_num_seqs + 1  # the last one for padding
        width = -(-sizes.max_model_len // sizes.block_size) + 1
        self.tables = DeviceTables(sizes.max_num_seqs, width)
        target = device.torch_device
        self._tables = torch.zeros((num_slots, width), dtype=torch.int32, device=target)  # (slots, width)
        self._newest = torch.zeros(num_slots, dtype=torch.int64, device=target)  # (slots): tokens
        self._rows = torch.arange(num_slots, dtype=torch.int32, device=target)  # (slots)
        self._staging = Staging(device, _upload_bytes(sizes))
        num_bytes = 8 * sizes.max_num_seqs
        self._results = [device.host_buffer(num_bytes).view(torch.int64) for _ in range(_NUM_RESULTS)]
        self._turn = 0
        self._graphs = DecodeGraphs(device, sizes.max_num_seqs)
        self._captures_graphs = captures_graphs and decoder.arithmetic.attention.is_capturable

    def launch(self, shares: list[Share]) -> PendingTokens:
        """Queue shares of different sequences; those of earlier launches are computed before.

        Raises `torch.OutOfMemoryError` if the device has too little memory left; nothing of the launch is
        then believed, and the same or smaller shares may be launched again.
        """
        launch = make_launch(shares, self.tables, self._sizes.block_size, self._decoder.config.vocab_size)
        is_captured = launch.is_decode_only and self._captures_graphs
        fixed = self._list_padded(launch) if is_captured else self._list_plain(launch)
        tensors = self._upload(fixed, launch)
        forward = partial(self._replay if is_captured else self._forward, launch, tensors[: len(fixed)])
        result = self._results[self._turn][: len(launch.wanted)]
        self._turn = (self._turn + 1) % _NUM_RESULTS
        drawn_logits: list[Tensor] = []
        self._device.launch(partial(self._choose, forward, tensors[len(fixed) :], result, drawn_logits))
        return PendingTokens(launch, result, self._device.record(), drawn_logits)

    def forget(self) -> None:
        """Let no sequence's block table be taken as known."""
        self.tables.forget()

    # ------------------------------------------------------------------ arrays

    def _list_padded(self, launch: Launch) -> list[NDArray[np.generic]]:
        """Return the arrays of a decode step, padded to the size that there is a graph for."""
        inputs, size = launch.inputs, find_bucket(self._graphs.buckets, len(launch.shares))
        return [
            _pad(inputs.input_ids, size, 0),
            _pad(inputs.positions, size, 0),
            _pad(inputs.slot_mapping, size, NO_SLOT),
            _pad(inputs.context_lens, size, 0),
            _pad(self._rows_of(launch.slots), size, self._sizes.max_num_seqs),
        ]

    def _list_plain(self, launch: Launch) -> list[NDArray[np.generic]]:
        inputs = launch.inputs
        return [
            inputs.input_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.context_lens,
            self._rows_of(launch.slots),
            inputs.query_starts,
            inputs.logits_rows,
        ]

    def _rows_of(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the rows of the device's tables for slots; a sequence that has none uses the last one."""
        return np.where(slots == NO_SLOT, np.int32(self._sizes.max_num_seqs), slots)

    def _upload(self, fixed: list[NDArray[np.generic]], launch: Launch) -> list[Tensor]:
        """Queue the step's copy and bring the block tables up to date.

        Returns the `fixed` arrays on the device, and behind them what `_choose` takes.
        """
        places, values = self.tables.take_changes()
        while len(places) > _MAX_CHANGES:  # many long prompts that were cached
            self._change_tables(*self._staging.upload([places[:_MAX_CHANGES], values[:_MAX_CHANGES]]))
            places, values = places[_MAX_CHANGES:], values[_MAX_CHANGES:]
        slots = np.array([share.sequence.slot for share in launch.wanted], np.int32)  # (wanted)
        wanted_slots = self._rows_of(slots).astype(np.int64)  # (wanted)
        arrays = [*fixed, wanted_slots, *(launch.draws or ()), places, values]
        tensors = self._staging.upload(arrays)
        if len(places):
            self._change_tables(*tensors[-2:])
        return tensors[:-2]

    def _change_tables(self, places: Tensor, values: Tensor) -> None:
        tables = self._tables.view(-1)  # (slots * width)
        self._device.launch(lambda: _put(tables, places, values))

    # ------------------------------------------------------------------ what the device does

    def _replay(self, launch: Launch, tensors: list[Tensor]) -> Tensor:
        """Return the logits (wanted, vocab_size) of a decode step, from its graph."""
        num_wanted = len(launch.wanted)
        captured = self._graphs.get(len(tensors[0]), partial(self._decode, tensors))
        if captured is None:
            return self._decode(tensors)[:num_wanted]
        graph, logits = captured
        graph.replay()
        return logits[:num_wanted]

    def _decode(self, tensors: list[Tensor]) -> Tensor:
        """Return the logits (rows, vocab_size) of one token for each sequence, padding included."""
        input_ids, positions, slot_mapping, context_lens, slots = tensors
        num_seqs = len(slots)
        batch = ForwardBatch(
            input_ids=self._know_tokens(input_ids, slots),
            positions=positions,
            slot_mapping=slot_mapping,
            query_starts=self._rows[: num_seqs + 1],
            context_lens=context_lens,
            block_tables=self._tables.index_select(0, slots),  # (sequences, width) int32
            logits_rows=self._rows[:num_seqs],
            num_decodes=num_seqs,
            max_query_len=1,
            max_context_len=self._sizes.max_model_len,
            has_padding=True,
        )
        return self._decoder.forward(batch, self._cache)

    def _forward(self, launch: Launch, tensors: list[Tensor]) -> Tensor:
        """Return the logits (wanted, vocab_size) of any shares."""
        input_ids, positions, slot_mapping, context_lens, slots, query_starts, logits_rows = tensors
        inputs = launch.inputs
        width = inputs.block_tables.shape[1]
        if inputs.num_decodes == len(slots):
            input_ids = self._know_tokens(input_ids, slots)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=self._tables[:, :width].index_select(0, slots),  # (sequences, width) int32
            logits_rows=logits_rows,
            num_decodes=inputs.num_decodes,
            max_query_len=max(share.count for share in launch.shares),
            max_context_len=max(share.end for share in launch.shares),
        )
        batch.plan = self._decoder.arithmetic.attention.plan(inputs, batch)
        return self._decoder.forward(batch, self._cache)

    def _know_tokens(self, input_ids: Tensor, slots: Tensor) -> Tensor:
        """Return the tokens (sequences) int32, those that were just sampled in place of unknown ones."""
        return torch.where(input_ids < 0, self._newest.index_select(0, slots).int(), input_ids)

    def _choose(
        self,
        forward: Callable[[], Tensor],
        tensors: list[Tensor],
        result: Tensor,
        drawn_logits: list[Tensor],
    ) -> None:
        """Compute, sample, keep the tokens for what is computed ahead, and send them to the host."""
        slots = tensors[0]  # (wanted) int64
        draws = DrawTensors(*tensors[1:]) if len(tensors) > 1 else None
        logits = forward()  # (wanted, vocab_size)
        if not len(slots):
            return
        token_ids = choose(logits, draws)  # (wanted) int64
        if draws is not None and len(draws.filtered):
            # A copy: a graph's next replay fills the same tensor.
            drawn_logits.append(logits.index_select(0, draws.rows))  # (draws, vocab_size)
        self._newest.index_copy_(0, slots, token_ids.clamp_min(0))
        result.copy_(token_ids, non_blocking=True)


def _pad(array: NDArray[np.int32], size: int, value: int) -> NDArray[np.int32]:
    padded = np.full(size, value, np.int32)  # (size)
    padded[: len(array)] = array
    return padded


def _put(target: Tensor, places: Tensor, values: Tensor) -> None:
    target.index_copy_(0, places, values)


def _upload_bytes(sizes: LaunchSizes) -> int:
    """Return what the largest upload takes: see `Launcher._upload`."""
    rows = 4 * max(sizes.max_num_tokens, sizes.max_num_seqs)
    seqs = 8 * (sizes.max_num_seqs + 1)
    arrays = [*[rows] * 3, *[seqs] * (4 + 1 + len(DrawTensors._fields)), 8 * _MAX_CHANGES, 4 * _MAX_CHANGES]
    return sum(padded_bytes(num_bytes) for num_bytes in arrays)
