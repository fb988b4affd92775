"""Which ranks run, for a process that has to end without closing them. Imports no torch."""

import subprocess

running: set[subprocess.Popen[bytes]] = set()
"""All ranks that this process has started and not closed."""


def kill_ranks() -> None:
    """End all ranks on the spot, also stopped ones.

    May be called in any thread and in a signal handler: it waits for nothing.
    """
    for process in tuple(running):
        process.kill()
