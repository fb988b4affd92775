"""Builds the engine that the settings ask for.

Loading imports numpy, transformers and where needed torch, which takes seconds. It is done here, in the
engine thread, so that pages answer meanwhile.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from app.model_store import models_dir, resolve_model
from app.settings import Settings

if TYPE_CHECKING:
    from engine.loading import LoadedEngine, LoadProgress

CACHE_FOLDER = ".converted"
"""Below the models folder: tokenizers in a form that loads fast."""

# Threads of torch that wait for each other sleep instead of spinning. The engine shares its cores with the
# event loop and often with a browser, and a thread that spins keeps the very thread off its core that it
# waits for: measured on two cores with two other busy processes, a step of 32 sequences took 327 ms (up to
# 2,289) spinning and 147 ms (up to 152) sleeping; on an idle machine sleeping costs about a tenth.
_THREAD_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def load_engine(settings: Settings, on_progress: Callable[["LoadProgress"], None]) -> "LoadedEngine":
    """Load the model; call in the engine thread. Raises `ModelError` or `ConfigError`."""
    for name, value in _THREAD_ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # read once, when torch is imported
    loading = importlib.import_module("engine.loading")
    request = loading.LoadRequest(
        model_path=resolve_model(settings.model),
        config=settings.make_engine_config(),
        kv_memory_bytes=settings.kv_memory,
        swap_memory_bytes=settings.swap_memory,
        cache_dir=models_dir() / CACHE_FOLDER,
        **asdict(settings.run_options),
    )
    return cast("LoadedEngine", loading.load_engine(request, on_progress))
