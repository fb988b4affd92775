"""Copies from the host tier that are on their way into blocks of a sequence."""

from dataclasses import dataclass


@dataclass(slots=True)
class Load:
    """One sequence's blocks on their way back. `pairs` are (host block, block).

    `owner` is its seq_id. `first_step` is the step that began it; after `LOAD_DEADLINE_STEPS` more the
    runner is told to wait for it. While it is under way nobody may reuse its blocks, whatever becomes of its
    owner: if that has ended, the load is an orphan.
    """

    load_id: int
    owner: int
    slot: int
    pairs: list[tuple[int, int]]
    first_step: int
    waited: bool = False
    is_orphan: bool = False


LOAD_DEADLINE_STEPS = 64
"""Steps that a load may take before the runner is told to finish it."""
