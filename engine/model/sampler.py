"""Next tokens for a mixed batch: greedy, or drawn with temperature, top-k and top-p.

A draw is a pure function of (logits of the row, parameters, seed, choice index, position): uniform
numbers come from a counter-based hash and turn into tokens through the inverse of the cumulative
distribution, and no row's result depends on which other rows are in the batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.uniform import uniform
from engine.records import FAILED_TOKEN_ID
from engine.sampling_params import SamplingParams

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


def sample(logits: Tensor, draws: list[Draw]) -> list[int]:
    """Return one token id per row of logits (rows, vocab_size).

    A row whose largest logit is no finite number gives `FAILED_TOKEN_ID`: only its own request is lost.
    """
    token_ids = logits.argmax(-1)  # (rows) int64; the first NaN where there is one
    is_broken = ~logits.gather(1, token_ids[:, None]).squeeze(1).isfinite()  # (rows) bool
    drawn = [row for row, draw in enumerate(draws) if not draw.params.is_greedy]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)  # (drawn) int64
        token_ids[rows] = _draw(logits.index_select(0, rows), [draws[row] for row in drawn])
    result: list[int] = token_ids.masked_fill_(is_broken, FAILED_TOKEN_ID).tolist()
    return result


def _draw(logits: Tensor, draws: list[Draw]) -> Tensor:
    device = logits.device
    temperature = torch.tensor([draw.params.temperature for draw in draws], device=device)  # (rows) float32
    numbers = torch.tensor(
        [uniform(draw.params.seed or 0, draw.choice_index, draw.position) for draw in draws],
        dtype=torch.float64,
        device=device,
    )  # (rows) float64
    # The maximum goes first and in float32: a tiny temperature then scales 0 and negative numbers only.
    wide = logits.float()  # (rows, vocab_size) float32
    scaled = (wide - wide.amax(-1, keepdim=True)) / temperature[:, None]  # (rows, vocab_size) float32
    probs = scaled.softmax(-1)  # (rows, vocab_size) float32
    vocab_size = logits.shape[-1]
    filtered = [row for row, draw in enumerate(draws) if _is_filtered(draw.params, vocab_size)]
    if not filtered:
        return _pick_from_all(probs, numbers)  # (rows) int64
    token_ids = torch.empty(len(draws), dtype=torch.int64, device=device)  # (rows) int64
    some = torch.tensor(filtered, device=device)  # (filtered) int64
    token_ids[some] = _pick_filtered(probs[some], numbers[some], [draws[row].params for row in filtered])
    if len(filtered) < len(draws):
        rest = [row for row, draw in enumerate(draws) if not _is_filtered(draw.params, vocab_size)]
        others = torch.tensor(rest, device=device)  # (rest) int64
        token_ids[others] = _pick_from_all(probs[others], numbers[others])
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


def _pick_filtered(probs: Tensor, numbers: Tensor, params: list[SamplingParams]) -> Tensor:
    """Draw from what top-k and then top-p leave, most likely first. Returns (rows) int64."""
    device, vocab_size = probs.device, probs.shape[-1]
    limits = [min(p.top_k, vocab_size) or vocab_size for p in params]
    top_k = torch.tensor(limits, device=device)[:, None]  # (rows, 1) int64
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]  # (rows, 1)
    best, ids = probs.topk(min(_NUM_CANDIDATES, vocab_size))  # 2 * (rows, candidates)
    token_ids = _pick_sorted(best, ids, (top_k, top_p), numbers)  # (rows) int64
    covers = best.sum(-1, dtype=torch.float64)[:, None] >= top_p  # (rows, 1) bool
    enough = (top_k <= best.shape[-1]) | (covers & (top_k >= vocab_size))  # (rows, 1) bool
    if best.shape[-1] < vocab_size and not bool(enough.all()):
        wide = (~enough.squeeze(1)).nonzero().squeeze(1)  # (wide) int64
        best, ids = probs[wide].sort(dim=-1, descending=True, stable=True)  # 2 * (wide, vocab_size)
        token_ids[wide] = _pick_sorted(best, ids, (top_k[wide], top_p[wide]), numbers[wide])
    return token_ids


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
