"""The real default model for the tests in this folder."""

from pathlib import Path

import pytest

from app.model_store import DEFAULT_MODEL, resolve_model
from engine.errors import ModelError


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    try:
        return resolve_model(DEFAULT_MODEL)
    except ModelError as error:
        pytest.fail(f"{error} (run `pageglass models fetch`)")
