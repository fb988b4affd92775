"""Stands in for `engine.parallel.worker`: a process that does as it is told, and is there at once.

`python -m tests.support.small_rank REPORTS`. Each frame on its standard input is a JSON list: what to do, and
with what.
"""

import json
import os
import sys
import time
from typing import Any


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            os._exit(0)
        data += part
    return data


def main() -> None:
    reports = int(sys.argv[1])
    while True:
        action, value = json.loads(_read(int.from_bytes(_read(4), "little")))
        _do(action, value, reports)


def _do(action: str, value: Any, reports: int) -> None:
    if action == "report":
        os.write(reports, json.dumps(value).encode() + b"\n")
    elif action == "beat":  # for good, as fast as it says
        while True:
            os.write(reports, b"{}\n")
            time.sleep(value)
    elif action == "exit":
        os._exit(value)


if __name__ == "__main__":
    main()
