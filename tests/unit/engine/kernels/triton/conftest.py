"""Kernels in Triton's interpreter, or compiled where there is a GPU; left out where Triton has no wheel."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import tests.support.triton_interpreter  # noqa: F401 - mends what the tests launch


@pytest.fixture(scope="package")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
