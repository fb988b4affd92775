"""A real server process to measure."""

import signal
import socket
import subprocess
import sys

STOP_TIMEOUT_S = 30


def start_server(data_dir: str, args: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    """Start `pageglass serve` on a free port; return the process and its URL, not waiting for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--data-dir", data_dir, *args]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    return process, f"http://127.0.0.1:{port}"


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """End the process as an operator would."""
    process.send_signal(signal.SIGTERM)
    process.wait(STOP_TIMEOUT_S)
