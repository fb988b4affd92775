"""Drives vLLM's server. Settings: `model` (folder)."""

import sys

from bench.peers.driver import Settings, serve
from bench.peers.server_driver import ServerCommand, ServerDriver


def load(settings: Settings) -> ServerDriver:
    """Start the server."""

    def arguments(port: int) -> list[str]:
        options = {
            "--model": settings["model"],
            "--served-model-name": "m",
            "--dtype": "bfloat16",
            "--max-model-len": "1024",
            "--max-num-seqs": "64",
            "--host": "127.0.0.1",
            "--port": str(port),
        }
        pairs = [part for option in options.items() for part in option]
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *pairs]

    return ServerDriver(
        ServerCommand(
            arguments,
            f"vLLM server, {settings['model']}",
            environment={"VLLM_SERVER_DEV_MODE": "1"},  # without it there is no way to empty the cache
            reset_path="/reset_prefix_cache",
        )
    )


if __name__ == "__main__":
    serve(load)
