"""CUDA graphs of decode steps, one for each of a few batch sizes, captured when first needed.

A decode step of a small model is hundreds of kernels of microseconds each; replaying a graph launches all of
them with one call.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

from torch import Tensor

from engine.runner.device import Device, Graph
from engine.runner.smaller_steps import is_out_of_memory

logger = logging.getLogger(__name__)

_SMALL_BUCKETS = (1, 2, 4, 8)
_STEP = 16


def list_buckets(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that have graphs; the last one is `max_num_seqs`.

    Padding costs the device little up to the next multiple of 16, which is how tensor cores count rows; above
    256, steps of an eighth.
    """
    buckets = [size for size in _SMALL_BUCKETS if size < max_num_seqs]
    size = _STEP
    while size < max_num_seqs:
        buckets.append(size)
        size += max(_STEP, size // 8 // _STEP * _STEP)
    return [*buckets, max_num_seqs]


def find_bucket(buckets: list[int], num_seqs: int) -> int:
    """Return the smallest batch size that so many sequences fit into."""
    return buckets[bisect_left(buckets, num_seqs)]


class DecodeGraphs:
    """The graphs that were captured so far."""

    def __init__(self, device: Device, max_num_seqs: int) -> None:
        """Capture nothing yet."""
        self.buckets = list_buckets(max_num_seqs)
        self._device = device
        self._is_full = False
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}

    def get(self, bucket: int, work: Callable[[], Tensor]) -> tuple[Graph, Tensor] | None:
        """Return the graph for a batch size and the tensor that it fills; captures `work` if there is none.

        None when there was once no memory to capture one: what is there serves, the rest goes without.
        """
        found = self._graphs.get(bucket)
        if found is None and not self._is_full:
            found = self._capture(bucket, work)
        return found

    def _capture(self, bucket: int, work: Callable[[], Tensor]) -> tuple[Graph, Tensor] | None:
        started = time.perf_counter()
        try:
            self._graphs[bucket] = self._device.capture(work)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._is_full = True
            logger.warning("No memory for a CUDA graph for %d sequences: such steps go without one", bucket)
            return None
        logger.info(
            "CUDA graph for up to %d sequences captured in %.2f s (%d of %d)",
            bucket,
            time.perf_counter() - started,
            len(self._graphs),
            len(self.buckets),
        )
        return self._graphs[bucket]
