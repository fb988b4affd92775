"""One copy a step: what is uploaded lies where it did before, and nothing is overwritten on its way."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.runner.staging import Staging, padded_bytes
from tests.support.fake_device import FakeDevice


def test_arrays_come_back_in_their_shapes_and_types() -> None:
    device = FakeDevice()
    staging = Staging(device, 1000)
    arrays: list[NDArray[Any]] = [
        np.arange(5, dtype=np.int32),
        np.array([1.5, -2.0], np.float64),
        np.zeros(0, np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        np.array([0.25], np.float32),
    ]
    tensors = staging.upload(arrays)
    device.record().wait()
    for array, tensor in zip(arrays, tensors, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.data_ptr() % 16 == 0 or not len(array)


def test_the_same_lengths_lie_at_the_same_places() -> None:
    device = FakeDevice()
    staging = Staging(device, 1000)
    first, second = (staging.upload([np.zeros(n, np.int32) for n in (3, 7, 1)]) for _ in range(2))
    assert [tensor.data_ptr() for tensor in first] == [tensor.data_ptr() for tensor in second]


def test_a_device_that_lags_behind_gets_every_upload_as_it_was() -> None:
    device = FakeDevice()
    staging = Staging(device, 64)
    seen: list[torch.Tensor] = []
    for number in range(12):
        (tensor,) = staging.upload([np.full(4, number, np.int32)])
        device.launch(lambda tensor=tensor: seen.append(tensor.clone()))  # type: ignore[misc]
    device.record().wait()
    assert [tensor.tolist() for tensor in seen] == [[number] * 4 for number in range(12)]


def test_more_than_there_is_room_for_is_a_bug_that_is_noticed() -> None:
    with pytest.raises(ValueError, match="more than 16 bytes"):
        Staging(FakeDevice(), 16).upload([np.zeros(5, np.int32)])


@pytest.mark.parametrize(("num_bytes", "padded"), [(0, 0), (1, 16), (16, 16), (17, 32)])
def test_padding(num_bytes: int, padded: int) -> None:
    assert padded_bytes(num_bytes) == padded
