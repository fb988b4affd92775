"""Requests that wait, in the order in which they are considered, and who may take whose place."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from engine.errors import ConfigError
from engine.sequence import Sequence

Place = tuple[int, int]
"""Lower places come first; the second number is the arrival and makes places unique."""


class QueueOrder:
    """First come, first served; a preempted sequence goes back to the place its arrival gives it."""

    name = "fcfs"
    interrupts = False
    """Whether urgency counts among running sequences, too: only then may `may_interrupt` be true."""

    @staticmethod
    def place(sequence: Sequence) -> Place:
        """Return the sequence's place in the queue, which never changes."""
        return 0, sequence.seq_id

    @staticmethod
    def may_displace(beneficiary: Sequence, victim: Sequence) -> bool:  # noqa: ARG004 - subclasses look
        """Whether `victim` may lose its blocks so that `beneficiary`, which runs, can go on."""
        return True

    @staticmethod
    def may_interrupt(newcomer: Sequence, victim: Sequence) -> bool:  # noqa: ARG004 - subclasses look
        """Whether `victim` may lose its blocks so that `newcomer`, which waits, can start."""
        return False

    @staticmethod
    def rank(victim: Sequence) -> int:  # noqa: ARG004 - subclasses look
        """Return what counts before the victim policy's score: the lowest go first."""
        return 0


class PriorityOrder(QueueOrder):
    """By arrival plus the ageing time for each step of priority: lower numbers first, and nobody starves.

    A sequence of priority p is overtaken only by those that arrive within (p - p') * ageing after it, p'
    being theirs; whoever comes later stands behind it and cannot take its blocks. So it ends, at the
    latest, when all that had arrived by (p - p_min) * ageing after it, p_min being the lowest number in use,
    and itself have been served one after the other. Two things are not overtaking: while it waits for a
    prefix that somebody is computing, others go on; and among equals the victim policy decides. (Ageing as a
    fixed virtual arrival needs no sorting again: the idea of virtual clocks, Zhang, SIGCOMM 1990.)
    """

    name = "priority"
    interrupts = True

    @staticmethod
    def place(sequence: Sequence) -> Place:
        """Return the sequence's place in the queue, which never changes."""
        return sequence.due_ns, sequence.seq_id

    @staticmethod
    def may_displace(beneficiary: Sequence, victim: Sequence) -> bool:
        """Whoever is less urgent, unless waiting has made up for it, or as urgent."""
        if victim.priority == beneficiary.priority:
            return True
        return PriorityOrder.may_interrupt(beneficiary, victim)

    @staticmethod
    def may_interrupt(newcomer: Sequence, victim: Sequence) -> bool:
        """Only who is less urgent, and has not made up for it by waiting."""
        return victim.priority > newcomer.priority and victim.due_ns > newcomer.due_ns

    @staticmethod
    def rank(victim: Sequence) -> int:
        """The least urgent go first."""
        return -victim.priority


_ORDERS: dict[str, type[QueueOrder]] = {order.name: order for order in (QueueOrder, PriorityOrder)}
QUEUE_POLICIES = tuple(_ORDERS)
"""Names that `make_queue_order` knows."""


def make_queue_order(policy: str) -> QueueOrder:
    """Return the order called `policy`; `ConfigError` lists the known ones."""
    if policy not in _ORDERS:
        raise ConfigError(f"policy is {policy!r}; allowed: {', '.join(_ORDERS)}.")
    return _ORDERS[policy]()


class WaitingQueue:
    """The waiting sequences, sorted by the places that an order gives them."""

    def __init__(self, order: QueueOrder) -> None:
        """Start empty."""
        self._sequences: list[Sequence] = []
        self._place: Callable[[Sequence], Place] = order.place

    def reorder(self, order: QueueOrder) -> None:
        """Sort by another order from here on."""
        self._place = order.place
        self._sequences.sort(key=self._place)

    def add(self, sequence: Sequence) -> None:
        """Insert at its place."""
        insort(self._sequences, sequence, key=self._place)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; it must be in."""
        index = bisect_left(self._sequences, self._place(sequence), key=self._place)
        if index == len(self._sequences) or self._sequences[index] is not sequence:
            raise KeyError(sequence.seq_id)
        del self._sequences[index]

    def __len__(self) -> int:
        """Count the waiting sequences."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Go through them in order; the queue may change meanwhile."""
        return iter(self._sequences.copy())
