"""Pages that watch a server, as cheap as they can be: `python -m bench.dashboards URL --number 10`.

Opens that many sockets to /ws/engine and, as a page does, takes every message and acknowledges it; what a
page does with its own processor (inflate, paint) is left out, since it happens on somebody else's machine.
For the same reason there is no event loop here, only the protocol: it takes three fifths of the CPU time.
Prints `connected`, runs until its standard input ends, then prints the messages and bytes that it took.
"""

import argparse
import json
import selectors
import socket
import struct
import sys

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN
from websockets.uri import parse_uri

_ACK, _FRAMES_A_SECOND = 8, 60
_RECEIVE_BYTES = 2**18


class Page:
    """One page, connected."""

    def __init__(self, url: str) -> None:
        """Connect to `url` (ws://…). Raises `OSError` or `InvalidHandshake` if that fails."""
        uri = parse_uri(url)
        self.num_messages = 0
        self.num_bytes = 0
        self.socket = socket.create_connection((uri.host, uri.port))
        self._protocol = ClientProtocol(uri, max_size=None)
        self._protocol.send_request(self._protocol.connect())
        self._send()
        while self._protocol.handshake_exc is None and self._protocol.state is not OPEN:
            self.take()
        if self._protocol.handshake_exc is not None:
            raise self._protocol.handshake_exc

    def take(self) -> None:
        """Take what has come, waiting if nothing has; raises `ConnectionError` if the server has left."""
        data = self.socket.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the server has ended a page's connection")
        self._protocol.receive_data(data)
        num_before = self.num_messages
        for event in self._protocol.events_received():
            if isinstance(event, Frame) and event.opcode is Opcode.BINARY:
                self.num_messages += 1
                self.num_bytes += len(event.data)
        if self.num_messages > num_before:
            ack = struct.pack("<BBHII", _ACK, _FRAMES_A_SECOND, 0, 0, self.num_messages)
            self._protocol.send_binary(ack)
        self._send()

    def close(self) -> None:
        """Say goodbye."""
        self._protocol.send_close()
        self._send()
        self.socket.close()

    def _send(self) -> None:
        for data in self._protocol.data_to_send():
            self.socket.sendall(data)


def watch(url: str, number: int) -> list[Page]:
    """Run `number` pages until standard input ends."""
    with selectors.DefaultSelector() as selector:
        pages = [Page(url) for _ in range(number)]
        for page in pages:
            selector.register(page.socket, selectors.EVENT_READ, page)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("connected", flush=True)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    return pages
                key.data.take()


def main() -> None:
    """Watch and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="of the server, such as http://127.0.0.1:8000")
    parser.add_argument("--number", type=int, default=10, help="default: %(default)s")
    options = parser.parse_args()
    pages = watch(options.url.replace("http", "ws", 1) + "/ws/engine", options.number)
    for page in pages:
        page.close()
    figures = {
        "dashboard_messages": sum(page.num_messages for page in pages),
        "dashboard_bytes": sum(page.num_bytes for page in pages),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
