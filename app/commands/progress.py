"""One line of progress: rewritten in place on a terminal, a plain line now and then elsewhere."""

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

_TERMINAL_INTERVAL_S = 0.1
_PLAIN_INTERVAL_S = 1.0


class ProgressLine:
    """Shows the latest state of something that takes long, on stderr.

    `update` may be called as often as one likes; it prints at most ten times a second on a terminal
    and once a second elsewhere. `close` leaves the cursor on a fresh line.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to `stream`, by default stderr."""
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._shown_s = float("-inf")
        self._is_open = False

    def update(self, text: str, *, force: bool = False) -> None:
        """Show the text, unless something was shown a moment ago and `force` is not set."""
        interval_s = _TERMINAL_INTERVAL_S if self._is_terminal else _PLAIN_INTERVAL_S
        now_s = self._clock()
        if not force and now_s - self._shown_s < interval_s:
            return
        self._shown_s = now_s
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[2K{text[:width]}")
            self._is_open = True
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """End the line that was rewritten in place."""
        if self._is_open:
            self._stream.write("\n")
            self._stream.flush()
            self._is_open = False
