"""Where the device tests run: on a GPU, or, to try the tests themselves, on what stands in for one."""

import importlib
import os

import pytest
import torch

IS_CUDA = torch.cuda.is_available()
IS_TRIED = not IS_CUDA and os.environ.get("PAGEGLASS_DEVICE_TESTS") == "cpu"
"""Slow, through Triton's interpreter, and so with fewer cases."""

NAME = "cuda" if IS_CUDA else "cpu"
DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")

needs_device = pytest.mark.skipif(not (IS_CUDA or IS_TRIED), reason="needs a CUDA device")
needs_cuda = pytest.mark.skipif(not IS_CUDA, reason="needs a CUDA device")

if IS_TRIED:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    importlib.import_module("tests.support.triton_interpreter")
if IS_CUDA or IS_TRIED:
    torch.set_num_threads(1)  # models are tiny, and other processes test beside this one
