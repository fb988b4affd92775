"""Next tokens for a mixed batch: greedy, or drawn with temperature, top-k and top-p.

A draw is a pure function of (logits of the row, parameters, seed, choice index, position): uniform
numbers come from a counter-based hash and turn into tokens through the inverse of the cumulative
distribution, and no row's result depends on which other rows are in the batch.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.uniform import uniform
from engine.records import FAILED_TOKEN_ID
from engine.sampling_params import SamplingParams

UNDECIDED_TOKEN_ID = -3
"""Stands for a token that `choose` cannot find: `decide` can, from the same logits."""

# Most filtered distributions fit into this many candidates; taking 256 of 49,152 costs a twentieth of
# sorting them (measured, 64 rows, two cores). A constant, so that rows do not depend on each other.
_NUM_CANDIDATES = 256

# Tokens are found in two stages, block then token, which spares a cumulative sum over the vocabulary.
_BLOCK = 256


class Draw(NamedTuple):
    """What a row's next token depends on beside its logits. `position` counts generated tokens."""

    params: SamplingParams
    choice_index: int
    position: int


class DrawArrays(NamedTuple):
    """How the drawn rows of a batch are drawn; `draws` counts them.

    `rows` (draws) int64: which rows of the logits; `temperatures` (draws) float32; `numbers` (draws) float64:
    uniform ones. The others are about those that top-k or top-p filter: `filtered` (filtered) int64, which of
    the draws; `top_ks` (filtered) int64, at least 1; `top_ps` (filtered) float64. `plain`: all other draws.
    """

    rows: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    numbers: NDArray[np.float64]
    filtered: NDArray[np.int64]
    top_ks: NDArray[np.int64]
    top_ps: NDArray[np.float64]
    plain: NDArray[np.int64]


class DrawTensors(NamedTuple):
    """`DrawArrays` on the device."""

    rows: Tensor
    temperatures: Tensor
    numbers: Tensor
    filtered: Tensor
    top_ks: Tensor
    top_ps: Tensor
    plain: Tensor


def list_draws(draws: list[Draw], vocab_size: int) -> DrawArrays | None:
    """Return what is drawn; None if all rows are greedy."""
    rows = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    if not rows:
        return None
    drawn = [draws[row] for row in rows]
    filtered = [i for i, draw in enumerate(drawn) if _is_filtered(draw.params, vocab_size)]
    kept = set(filtered)
    return DrawArrays(
        rows=np.array(rows, np.int64),
        temperatures=np.array([draw.params.temperature for draw in drawn], np.float32),
        numbers=np.array(
            [uniform(d.params.seed or 0, d.choice_index, d.position) for d in drawn], np.float64
        ),
        filtered=np.array(filtered, np.int64),
        top_ks=np.array([min(drawn[i].params.top_k, vocab_size) or vocab_size for i in filtered], np.int64),
        top_ps=np.array([drawn[i].params.top_p for i in filtered], np.float64),
        plain=np.array([i for i in range(len(drawn)) if i not in kept], np.int64),
    )


def sample(logits: Tensor, draws: list[Draw]) -> list[int]:
    """Return one token id per row of logits (rows, vocab_size).

    A row whose largest logit is no finite number gives `FAILED_TOKEN_ID`: only its own request is lost.
    """
    arrays = list_draws(draws, logits.shape[-1])
    tensors = None
    if arrays is not None:
        tensors = DrawTensors(*(torch.from_numpy(array).to(logits.device) for array in arrays))
    token_ids: list[int] = choose(logits, tensors).tolist()
    undecided = [row for row, token_id in enumerate(token_ids) if token_id == UNDECIDED_TOKEN_ID]
    if undecided:
        rows = torch.tensor(undecided, device=logits.device)  # (undecided) int64
        decided = decide(logits.index_select(0, rows), [draws[row] for row in undecided])
        for row, token_id in zip(undecided, decided, strict=True):
            token_ids[row] = token_id
    return token_ids


def choose(logits: Tensor, draws: DrawTensors | None) -> Tensor:
    """Return one token id per row of logits (rows, vocab_size): (rows) int64, without waiting for the device.

    `FAILED_TOKEN_ID` where the largest logit is no finite number, `UNDECIDED_TOKEN_ID` where top-p or top-k
    leave more than the candidates that are looked at.
    """
    token_ids = logits.argmax(-1)  # (rows) int64; the first NaN where there is one
    is_broken = ~logits.gather(1, token_ids[:, None]).squeeze(1).isfinite()  # (rows) bool
    if draws is not None:
        token_ids.index_copy_(0, draws.rows, _draw(logits.index_select(0, draws.rows), draws))
    return token_ids.masked_fill_(is_broken, FAILED_TOKEN_ID)


def decide(logits: Tensor, draws: list[Draw]) -> list[int]:
    """Return the tokens of filtered draws (rows, vocab_size) by sorting all of the vocabulary."""
    arrays = list_draws(draws, logits.shape[-1])
    assert arrays is not None
    assert len(arrays.filtered) == len(draws), "only filtered draws can be undecided"
    tensors = DrawTensors(*(torch.from_numpy(array).to(logits.device) for array in arrays))
    probs = _probabilities(logits, tensors.temperatures)  # (rows, vocab_size) float32
    best, ids = probs.sort(dim=-1, descending=True, stable=True)  # 2 * (rows, vocab_size)
    limits = (tensors.top_ks[:, None], tensors.top_ps[:, None])  # 2 * (rows, 1)
    token_ids: list[int] = _pick_sorted(best, ids, limits, tensors.numbers).tolist()
    return token_ids


def _probabilities(logits: Tensor, temperatures: Tensor) -> Tensor:
    # The maximum goes first and in float32: a tiny temperature then scales 0 and negative numbers only.
    wide = logits.float()  # (rows, vocab_size) float32
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperatures[:, None]  # (rows, vocab_size) float32
    return scaled.softmax(-1)  # (rows, vocab_size) float32


def _draw(logits: Tensor, draws: DrawTensors) -> Tensor:
    probs = _probabilities(logits, draws.temperatures)  # (draws, vocab_size) float32
    if not len(draws.filtered):
        return _pick_from_all(probs, draws.numbers)  # (draws) int64
    token_ids = torch.empty(len(probs), dtype=torch.int64, device=probs.device)  # (draws) int64
    some = draws.filtered  # (filtered) int64
    numbers = draws.numbers.index_select(0, some)  # (filtered) float64
    picked = _pick_filtered(probs.index_select(0, some), numbers, draws.top_ks, draws.top_ps)
    token_ids.index_copy_(0, some, picked)
    if len(draws.plain):
        others = draws.plain  # (plain) int64
        numbers = draws.numbers.index_select(0, others)  # (plain) float64
        token_ids.index_copy_(0, others, _pick_from_all(probs.index_select(0, others), numbers))
    return token_ids


def _is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size


def _pick_from_all(probs: Tensor, numbers: Tensor) -> Tensor:
    """Invert the cumulative distribution in the order of token ids. Returns (rows) int64."""
    rows, vocab_size = probs.shape
    padding = -vocab_size % _BLOCK
    if padding:
        probs = torch.nn.functional.pad(probs, (0, padding))  # (rows, blocks * _BLOCK) float32
    blocks = probs.view(rows, -1, _BLOCK)  # (rows, blocks, _BLOCK) float32
    mass = blocks.sum(-1, dtype=torch.float64)  # (rows, blocks) float64
    block, residual = _invert(mass, numbers * mass.sum(-1))
    chosen = blocks[torch.arange(rows, device=probs.device), block].double()  # (rows, _BLOCK) float64
    within, _ = _invert(chosen, residual)
    return block * _BLOCK + within  # (rows) int64


def _invert(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entry (rows) int64 in which the running sum passes `target`, and what is left of it.

    mass (rows, n) float64, target (rows) float64. An entry without mass is never returned, even
    when rounding has put the target at the total.
    """
    running = mass.cumsum(-1)  # (rows, n) float64
    last = (running < running[:, -1:]).sum(-1)  # (rows): the last entry with mass
    entry = (running <= target[:, None]).sum(-1).minimum(last)  # (rows) int64
    before = running.gather(1, entry[:, None]) - mass.gather(1, entry[:, None])  # (rows, 1) float64
    return entry, target - before.squeeze(1)


def _pick_filtered(probs: Tensor, numbers: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """Draw from what top-k and then top-p leave, most likely first. Returns (rows) int64.

    `UNDECIDED_TOKEN_ID` where that is more than the best `_NUM_CANDIDATES`.
    """
    vocab_size = probs.shape[-1]
    top_k, top_p = top_ks[:, None], top_ps[:, None]  # 2 * (rows, 1)
    best, ids = probs.topk(min(_NUM_CANDIDATES, vocab_size))  # 2 * (rows, candidates)
    token_ids = _pick_sorted(best, ids, (top_k, top_p), numbers)  # (rows) int64
    if best.shape[-1] == vocab_size:
        return token_ids
    covers = best.sum(-1, dtype=torch.float64)[:, None] >= top_p  # (rows, 1) bool
    is_enough = (top_k <= best.shape[-1]) | (covers & (top_k >= vocab_size))  # (rows, 1) bool
    return token_ids.masked_fill_(~is_enough.squeeze(1), UNDECIDED_TOKEN_ID)


def _pick_sorted(best: Tensor, ids: Tensor, limits: tuple[Tensor, Tensor], numbers: Tensor) -> Tensor:
    """Draw from probabilities in descending order, cut by top_k and top_p (rows, 1). Returns (rows)."""
    top_k, top_p = limits
    ranks = torch.arange(best.shape[-1], device=best.device)  # (candidates) int64
    kept = best.double().masked_fill(ranks >= top_k, 0.0)  # (rows, candidates) float64
    # top_p counts from what top_k left; without top_k the candidates are part of a distribution of sum 1.
    total = torch.where(top_k <= best.shape[-1], kept.sum(-1, keepdim=True), 1.0)  # (rows, 1) float64
    before = kept.cumsum(-1) - kept  # (rows, candidates): mass of better tokens; 0 for the best one
    kept = kept.masked_fill(before >= top_p * total, 0.0)  # (rows, candidates) float64
    entry, _ = _invert(kept, numbers * kept.sum(-1))
    return ids.gather(1, entry[:, None]).squeeze(1)  # (rows) int64
