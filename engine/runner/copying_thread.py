"""The thread in which blocks are copied, and its end: with the copier, or with the process.

Imports nothing heavy, since the server asks at its end whether such a thread is left.
"""

import atexit
import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S = 2.0
"""How long the end of the process waits for the copies that are under way."""


class CopyingThread(threading.Thread):
    """Calls what comes into its inbox, one after the other; ends with a None.

    The interpreter does not wait for it: a copy that never ends must not keep the process alive.
    """

    def __init__(self) -> None:
        """Not started."""
        super().__init__(name="block-copier", daemon=True)
        # The queue for finalizers: a put neither waits nor takes a lock of Python's.
        self.inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()

    def run(self) -> None:
        """Make the calls."""
        while (call := self.inbox.get()) is not None:
            call()
            del call  # it holds the copier, which nobody else may have any more


def end_copying() -> bool:
    """Let all copies end that any copier has queued; no copier can be used afterwards.

    Return whether they did end. A thread that copies while the process ends would be torn out of it.
    """
    threads = [thread for thread in threading.enumerate() if isinstance(thread, CopyingThread)]
    for thread in threads:
        thread.inbox.put(None)
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _end_with_process() -> None:
    if not end_copying():
        logger.error("A copy between KV pool and host tier does not end; the process ends without it.")


atexit.register(_end_with_process)
