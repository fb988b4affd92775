"""Token ids that stand in for texts which a trace does not publish: right length, right sharing."""

import math
import random

from app.load.traces import TOKENS_PER_HASH_ID, TraceRow

NUM_LOW_IDS = 1000
"""Special tokens and single bytes lie among the first ids of usual vocabularies; they are not used."""


class TokenSource:
    """Makes the prompt of a trace row; the same seed gives the same tokens."""

    def __init__(self, vocab_size: int, seed: int, scale: float) -> None:
        """Draw ids below `vocab_size`; lengths are divided by `scale`."""
        self._ids = range(min(NUM_LOW_IDS, vocab_size // 2), vocab_size)
        self._seed = seed
        self._scale = scale
        self._tokens_per_hash_id = max(1, round(TOKENS_PER_HASH_ID / scale))

    def num_prompt_tokens(self, row: TraceRow) -> int:
        """Return the scaled length of a prompt, at least 1.

        With hash ids, all but the last stand for a whole scaled block and the last one for its share,
        so that rows that share ids share exactly those tokens, whatever the scale.
        """
        if not row.hash_ids:
            return max(1, round(row.num_prompt_tokens / self._scale))
        num_whole = len(row.hash_ids) - 1
        rest = row.num_prompt_tokens - num_whole * TOKENS_PER_HASH_ID
        return num_whole * self._tokens_per_hash_id + math.ceil(
            rest * self._tokens_per_hash_id / TOKENS_PER_HASH_ID
        )

    def num_output_tokens(self, row: TraceRow) -> int:
        """Return the scaled length of an answer, at least 1."""
        return max(1, round(row.num_output_tokens / self._scale))

    def prompt(self, row: TraceRow, index: int) -> list[int]:
        """Return the token ids of a row; `index` tells rows without hash ids apart."""
        num_tokens = self.num_prompt_tokens(row)
        if not row.hash_ids:
            return self.draw(f"row {index}", num_tokens)
        tokens: list[int] = []
        for hash_id in row.hash_ids:
            tokens += self.draw(f"hash {hash_id}", self._tokens_per_hash_id)
        return tokens[:num_tokens]

    def draw(self, name: str, num_tokens: int) -> list[int]:
        """Return ids that depend on nothing but the seed and the name."""
        generator = random.Random(f"{self._seed} {name}")  # noqa: S311 - filler text, not a secret
        return generator.choices(self._ids, k=num_tokens)
