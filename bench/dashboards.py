"""Pages that watch a server, as cheap as they can be: `python -m bench.dashboards URL --number 10`.

Opens that many sockets to /ws/engine and, as a page does, takes every message and acknowledges it; what a
page does with its own processor (inflate, paint) is left out, since it happens on somebody else's machine.
Prints `connected`, runs until its standard input ends, then prints the messages and bytes that it took.
"""

import argparse
import asyncio
import json
import struct
import sys
from dataclasses import dataclass

from websockets.asyncio.client import ClientConnection, connect

_ACK, _FRAMES_A_SECOND = 8, 60


@dataclass
class Taken:
    """What one page has taken."""

    num_messages: int = 0
    num_bytes: int = 0


async def watch(url: str, number: int) -> Taken:
    """Run `number` pages until standard input ends."""
    sockets = [await connect(url, compression=None, max_size=None) for _ in range(number)]
    taken = [Taken() for _ in sockets]
    pages = [
        asyncio.create_task(_run_page(socket, page)) for socket, page in zip(sockets, taken, strict=True)
    ]
    print("connected", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for page in pages:
        if page.done():
            page.result()  # raises what ended it
        page.cancel()
    await asyncio.gather(*pages, return_exceptions=True)
    await asyncio.gather(*(socket.close() for socket in sockets))
    return Taken(sum(page.num_messages for page in taken), sum(page.num_bytes for page in taken))


async def _run_page(socket: ClientConnection, taken: Taken) -> None:
    async for message in socket:
        taken.num_messages += 1
        taken.num_bytes += len(message)
        await socket.send(struct.pack("<BBHII", _ACK, _FRAMES_A_SECOND, 0, 0, taken.num_messages))


def main() -> None:
    """Watch and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--number", type=int, default=10, help="default: %(default)s")
    options = parser.parse_args()
    url = options.url.replace("http", "ws", 1) + "/ws/engine"
    taken = asyncio.run(watch(url, options.number))
    print(json.dumps({"dashboard_messages": taken.num_messages, "dashboard_bytes": taken.num_bytes}))


if __name__ == "__main__":
    main()
