"""Drives llama.cpp's server. Settings: `file` (GGUF), `slots` (sequences at once)."""

from pathlib import Path

from bench.peers.driver import Settings, serve
from bench.peers.server_driver import ServerCommand, ServerDriver

_CACHING = ("W3p", "W3w")
_TOKENS_A_SLOT = 1024


def load(settings: Settings) -> ServerDriver:
    """Start the server."""
    server = Path(settings["home"]) / "llama-bin/llama-server"
    slots, threads = settings["slots"], str(settings["threads"])

    def arguments(port: int) -> list[str]:
        options = {
            "-m": settings["file"],
            "-t": threads,
            "-tb": threads,
            "-np": str(slots),
            "-c": str(_TOKENS_A_SLOT * slots),
            "-cram": "0",
            "--host": "127.0.0.1",
            "--port": str(port),
        }
        pairs = [part for option in options.items() for part in option]
        return [str(server), *pairs, "--no-kv-unified", "--no-webui", "--log-verbosity", "0"]

    return ServerDriver(
        ServerCommand(
            arguments,
            f"llama.cpp server, {Path(settings['file']).name}, {slots} slots",
            restarts_for=_CACHING,
            body_fields=lambda case: {"cache_prompt": case in _CACHING},
        )
    )


if __name__ == "__main__":
    serve(load)
