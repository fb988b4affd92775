"""Start-up time: `python -m bench.startup [--runs 5] [-- serve options]`.

Starts real server processes and times process start to listening (the page answers) and to ready
(the model answers). The first run warms the caches and is not counted.
"""

import argparse
import http.client
import statistics
import sys
import tempfile
import time
from urllib.parse import urlsplit

from bench.common import print_table, versions, yardstick
from bench.server import start_server, stop_server

POLL_S = 0.02


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options, serve_args = parser.parse_known_args()
    print(versions())
    print(yardstick())
    listening_s, ready_s = [], []
    for run in range(options.runs + 1):
        with tempfile.TemporaryDirectory() as data_dir:
            started = time.perf_counter()
            process, url = start_server(data_dir, [arg for arg in serve_args if arg != "--"])
            try:
                listening = _wait_for(url + "/health/live") - started
                ready = _wait_for(url + "/health/ready") - started
            finally:
                stop_server(process)
        print(f"run {run}: listening {listening:.2f} s, ready {ready:.2f} s", file=sys.stderr)
        if run:
            listening_s.append(listening)
            ready_s.append(ready)
    print_table(
        [f"process start to …, {options.runs} runs", "median s", "min s", "max s"],
        [
            [name, statistics.median(values), min(values), max(values)]
            for name, values in (("listening", listening_s), ("ready", ready_s))
        ],
    )
    print(yardstick())


def _wait_for(url: str) -> float:
    """Ask until the answer is 200, with a client that costs next to nothing: both share the cores."""
    parts = urlsplit(url)
    while True:
        connection = http.client.HTTPConnection(parts.netloc, timeout=5)
        try:
            connection.request("GET", parts.path)
            if connection.getresponse().status == http.client.OK:
                return time.perf_counter()
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
