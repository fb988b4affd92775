"""A model in the native kernels without an engine around it, and what the machine could do for it."""

import sys

from app.model_store import resolve_model
from bench.costs import ModelCosts
from bench.own_engine import EngineOptions, load_as_served
from engine.core import EngineCore
from engine.kernels.cpu.library import Ceilings, NativeModel
from engine.loading import LoadedEngine
from engine.model.check import open_model
from engine.native_backend import open_library
from engine.runner.native_runner import NativeRunner


class LoadedModel:
    """A model that the native kernels run. Ends the program where torch would have to serve it."""

    def __init__(self, options: EngineOptions) -> None:
        """Load it."""
        self._loaded: LoadedEngine = load_as_served(options)
        if not isinstance(self._loaded.core.runner, NativeRunner):
            sys.exit(f"The native kernels do not run this: {self._loaded.info}")
        self.model: NativeModel = self._loaded.core.runner.model
        self.description = str(self._loaded.info)
        self.library = open_library(self.model.isa, lambda _: None)
        sizes = self.model.sizes
        self.costs = ModelCosts(open_model(resolve_model(options.model)), sizes.dtype, sizes.kv_dtype)

    def make_core(self) -> EngineCore:
        """Return a new engine over the model, with an empty prefix cache."""
        return EngineCore(self._loaded.core.config, self._loaded.core.runner)

    def measure_ceilings(self) -> Ceilings:
        """Measure what the machine can do now, with the threads and instructions of the model."""
        return self.library.measure_ceilings(self.model.sizes.num_threads)

    def peak_gops(self, ceilings: Ceilings) -> float:
        """Return the peak of the arithmetic that the linear layers use, in 10^9 operations a second."""
        by_dtype = {"bf16": ceilings.bf16_gflops, "fp32": ceilings.fp32_gflops}
        return by_dtype.get(self.model.sizes.dtype, ceilings.int8_gops)


def describe(ceilings: Ceilings) -> str:
    """Return ceilings as one line."""
    return (
        f"ceilings: int8 {ceilings.int8_gops:.0f} GOP/s, bf16 {ceilings.bf16_gflops:.0f} GFLOP/s, "
        f"fp32 {ceilings.fp32_gflops:.0f}, read {ceilings.read_gb_s:.1f} GB/s, copy {ceilings.copy_gb_s:.1f}"
    )
