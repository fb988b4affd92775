"""Drives our server. Settings: `arguments` of `pageglass serve`."""

import shutil
import sys
import tempfile

from bench.common import Figures
from bench.peers.driver import Job, Settings, serve
from bench.peers.server_driver import ServerCommand, ServerDriver


class OwnServer:
    """A `Driver` whose every run has a server with an empty prefix cache and history."""

    def __init__(self, settings: Settings) -> None:
        """Start the server."""
        self._folder = tempfile.mkdtemp()

        def arguments(port: int) -> list[str]:
            data_dir = tempfile.mkdtemp(dir=self._folder)
            options = ["--port", str(port), "--data-dir", data_dir, "--served-model-name", "m"]
            return [sys.executable, "-m", "app", "serve", *options, *settings["arguments"]]

        self._server = ServerDriver(
            ServerCommand(
                arguments,
                " ".join(["pageglass serve", *settings["arguments"]]),
                health_path="/health/ready",
                restarts_for=("W1", "W2", "W3p", "W3w", "W4"),
            )
        )
        self.description = self._server.description

    def run(self, job: Job) -> Figures:
        """Run a job on a server of its own."""
        return self._server.run(job)

    def close(self) -> None:
        """End the server and forget its data."""
        self._server.close()
        shutil.rmtree(self._folder)


if __name__ == "__main__":
    serve(OwnServer)
