"""Finding stop strings in text that comes in pieces."""


class StopMatcher:
    """Cuts a text at the first stop string and never lets a part of one through.

    Text is passed on as soon as it cannot be the beginning of a stop string any more. The stop string
    that is complete first wins, so the result does not depend on where the pieces were cut.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Watch for any of `stops`, none of them empty."""
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take a piece; return the text that is safe to send and whether a stop string was complete.

        After a stop string nothing more may be pushed.
        """
        text = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        safe = len(text) - num_held
        self._held = text[safe:]
        return text[:safe], False

    def finish(self) -> str:
        """Return the text that was held back: the answer ended before a stop string was complete."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
