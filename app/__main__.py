"""`python -m app` is the same as `pageglass`."""

import importlib
import os
import signal

EXIT_INTERRUPTED = 130


def run() -> None:
    """Run the command; Ctrl-C ends it quietly from the first moment on."""
    original = signal.getsignal(signal.SIGINT)
    if original is not signal.SIG_IGN:  # as in a background job of a shell
        # The imports take a while, and an interrupt in them would end in a traceback of some library.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    main = importlib.import_module("app.cli").main
    signal.signal(signal.SIGINT, original)
    main(prog_name="pageglass")


if __name__ == "__main__":
    run()
