"""What the event loop tells the engine thread."""

import asyncio
from dataclasses import dataclass

from engine.records import Policies
from engine.sequence import EngineRequest


@dataclass(frozen=True)
class Submit:
    """Queue all choices of one request, or none if one is refused; `admitted` tells which."""

    requests: list[EngineRequest]
    admitted: asyncio.Future[None]


@dataclass(frozen=True)
class Abort:
    """End a request."""

    request_id: str


@dataclass(frozen=True)
class StopChoice:
    """End one choice as complete."""

    request_id: str
    choice_index: int


@dataclass(frozen=True)
class SetPolicies:
    """Decide by other policies: `changes` by field of `Policies`, the others stay as they are.

    `applied` gets those that are then in force, once the record that says so has been handed over.
    """

    changes: dict[str, str]
    applied: "asyncio.Future[AppliedPolicies]"


@dataclass(frozen=True)
class AppliedPolicies:
    """What is in force from step `step` on."""

    policies: Policies
    step: int


@dataclass(frozen=True)
class Wake:
    """Ends an idle wait, nothing else."""


Command = Submit | Abort | StopChoice | SetPolicies | Wake
