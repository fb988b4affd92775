"""Drives our engine in the process. Settings: the fields of `bench.own_engine.EngineOptions`."""

from dataclasses import fields

from bench.common import Figures
from bench.own_engine import EngineOptions, OwnEngine
from bench.peers.driver import Job, Settings, serve


class OwnDriver:
    """A `Driver` of our engine."""

    def __init__(self, settings: Settings) -> None:
        """Load the model."""
        options = EngineOptions(**{item.name: settings[item.name] for item in fields(EngineOptions)})
        self._engine = OwnEngine(options)
        self.description = f"Pageglass, {self._engine.description}"

    def run(self, job: Job) -> Figures:
        """Run a job on an engine of its own over the loaded model."""
        return self._engine.run(job.case, job.prompts)

    def close(self) -> None:
        """Nothing to end."""


if __name__ == "__main__":
    serve(OwnDriver)
