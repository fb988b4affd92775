"""Logits of other engines, from a process that is run by their own Python.

The process reads a prompt a line (JSON list of token ids, or for llama.cpp numbers and spaces) and writes the
logits after each token, float32 (tokens, vocab_size), as raw bytes.
"""

import subprocess
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bench.common import ROOT
from bench.peers.install import build_llama_logits
from bench.peers.table import PEERS, Home

LOGITS_PEERS = (
    "openvino-int8",
    "openvino-bf16",
    "transformers",
    "llamacpp-q4_0",
    "llamacpp-q8_0",
    "llamacpp-bf16",
)


class PeerLogits:
    """The logits of a peer; a context manager."""

    def __init__(self, peer: str, home: Home, vocab_size: int) -> None:
        """Start the process."""
        self._vocab_size = vocab_size
        self._process = subprocess.Popen(
            _command(peer, home), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait()

    def __call__(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Return the logits (tokens, vocab_size)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{token_ids}\n".encode())
        self._process.stdin.flush()
        num_bytes = 4 * len(token_ids) * self._vocab_size
        data = self._process.stdout.read(num_bytes)
        if len(data) != num_bytes:
            raise SystemExit(f"the process ended with status {self._process.wait()}; see above")
        return np.frombuffer(data, np.float32).reshape(len(token_ids), self._vocab_size).copy()


def _command(peer: str, home: Home) -> list[str | Path]:
    settings: dict[str, Any] = PEERS[peer].settings(home)
    if peer.startswith("llamacpp-"):
        return [build_llama_logits(home), settings["file"]]
    python = home.python(PEERS[peer].venv or "")
    if peer == "transformers":
        return [python, "-m", "bench.peers.logits_transformers", settings["model"]]
    return [python, "-m", "bench.peers.logits_openvino", settings["model"], *settings["properties"].values()]
