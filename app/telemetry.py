"""Logging: plain lines on stderr, one level for the whole program."""

import logging
import logging.config
import time

QUIET_LOGGERS = ("uvicorn", "uvicorn.error", "httpx", "asyncio")
"""Chatty at `info`; they speak from `warning` on unless everything is wanted."""


def configure_logging(level: str) -> None:
    """Send the log to stderr, times in UTC."""
    handler = logging.StreamHandler()
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        for name in QUIET_LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
