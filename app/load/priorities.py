"""Which share of a load has which priority."""

import re
from collections.abc import Sequence
from dataclasses import replace

from app.load.files import LoadError
from app.load.workload import Job, Workload

MAX_MIX_CHARS = 400
_PART = re.compile(r"([A-Za-z][A-Za-z0-9_-]{0,31})=([0-9]{0,3}(?:\.[0-9]{0,9})?)", re.ASCII)
_TOLERANCE = 1e-9

PriorityMix = tuple[tuple[str, float], ...]
"""Names of classes with their shares of all requests; the rest has no class."""


def parse_mix(text: str) -> PriorityMix:
    """Return what `premium=0.2,bulk=0.3` means; raises `LoadError` that says what is wrong with it."""
    if len(text) > MAX_MIX_CHARS:
        raise LoadError(f"The priorities have {len(text)} characters; allowed: {MAX_MIX_CHARS}.")
    mix: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = _PART.fullmatch(part)
        if found is None or found[2] in {"", "."}:
            raise LoadError(
                f"{part[:40]!r} is no class with its share; write priorities like premium=0.2,bulk=0.3."
            )
        if found[1] in mix:
            raise LoadError(f"The class {found[1]} is there more than once.")
        mix[found[1]] = float(found[2])
    if sum(mix.values()) > 1 + _TOLERANCE:
        raise LoadError(f"The shares add up to {sum(mix.values()):g}; allowed: at most 1.")
    return tuple(mix.items())


def assign_priorities(workload: Workload, mix: PriorityMix) -> Workload:
    """Return a workload whose jobs have classes in these shares, evenly spread over it.

    Each job goes to the class that is furthest behind its share (smooth weighted round robin, as nginx does).
    """
    if not mix:
        return workload
    rest = max(0.0, 1 - sum(share for _, share in mix))
    names = spread([*mix, ("", rest)], len(workload.jobs))
    jobs = [_with_priority(job, name) for job, name in zip(workload.jobs, names, strict=True)]
    return replace(workload, jobs=jobs)


def spread(mix: Sequence[tuple[str, float]], count: int) -> list[str]:
    """Return `count` names in these shares."""
    behind = dict.fromkeys((name for name, _ in mix), 0.0)
    names = []
    for _ in range(count):
        for name, share in mix:
            behind[name] += share
        name = max(behind, key=behind.__getitem__)
        behind[name] -= 1
        names.append(name)
    return names


def _with_priority(job: Job, name: str) -> Job:
    def make_body(answers: Sequence[str]) -> dict[str, object]:
        body = job.make_body(answers)
        return {**body, "priority": name} if name else body

    return replace(job, make_body=make_body, priority=name)
