"""The processes that compute a model together: a `Group` over torch.distributed, gloo or NCCL.

The process group is made directly and not through `torch.distributed.init_process_group`: that one is global
to a process, and this one has to be made again whenever the ranks were started over, in a server that goes
on.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional

from engine.errors import EngineInvariantError
from engine.model.shards import Shard

_distributed: Any = distributed  # half of what is needed of it has no types

CONNECT_TIMEOUT_S = 30.0
"""How long a rank waits for the others to connect; they have loaded by then."""

_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Not what ends a step that hangs: `engine.parallel.monitor` does, much earlier. A server that is stopped for
minutes, by Ctrl-Z for example, must be able to go on."""

_LOOPBACK = "127.0.0.1"

# Ranks are on one machine, and NCCL's own watchdog must not end the server: the monitor does that to ranks.
_NCCL_ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class RankGroup:
    """One process's place among those that compute a model together. Owned by the thread that computes."""

    def __init__(self, shard: Shard) -> None:
        """Be a rank of a group that is not connected yet."""
        self.shard = shard
        self._connection: Any = None

    def connect(self, store_path: Path, backend: str) -> None:
        """Meet the others in the file `store_path`, which must be a new one each time; all ranks call this.

        Raises `RuntimeError` (torch's) if they do not come.
        """
        store = _distributed.FileStore(str(store_path), self.shard.size)
        store.set_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
        make = _connect_nccl if backend == "nccl" else _connect_gloo
        self._connection = make(store, self.shard)

    def abort(self) -> None:
        """Make a sum that is under way on a GPU end, from any thread. On the CPU it ends with its peers."""
        connection = self._connection
        if connection is not None and connection.name() == "nccl":
            connection.abort()

    def disconnect(self) -> None:
        """Let go of the connection."""
        self._connection = None

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' x, in place. Raises `RuntimeError` (torch's) if a rank is gone."""
        self._connected().allreduce([x]).wait()
        return x

    def join_logits(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Return to rank 0 the logits (rows, vocab_size) of all shares, to the others their own."""
        shares = [Shard(rank, self.shard.size).cut(vocab_size) for rank in range(self.shard.size)]
        widths = [share.stop - share.start for share in shares]
        is_receiver = self.shard.rank == 0
        if len(logits) == 0:
            return logits.new_empty((0, vocab_size)) if is_receiver else logits
        # All have to send as many numbers, and the first share is the largest.
        padded = functional.pad(logits, (0, widths[0] - logits.shape[-1]))  # (rows, widths[0])
        parts = [torch.empty_like(padded) for _ in widths] if is_receiver else []  # size * (rows, widths[0])
        options = _distributed.GatherOptions()
        options.rootRank = 0
        self._connected().gather([parts] if is_receiver else [], [padded], options).wait()
        if not is_receiver:
            return logits
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], -1)

    def _connected(self) -> Any:
        if self._connection is None:
            raise EngineInvariantError("the ranks are not connected")
        return self._connection


def _connect_gloo(store: Any, shard: Shard) -> Any:
    options = _distributed.ProcessGroupGloo._Options()  # noqa: SLF001 - torch has no other name for it
    options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - one sum at a time
    # gloo has no authentication; left alone it listens on whatever address the host's name stands for.
    options._devices = [_distributed.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]  # noqa: SLF001
    connection = _distributed.ProcessGroupGloo(store, shard.rank, shard.size, options)
    # Whoever is through with connecting may remove the file of the store; so all have to be, with this sum.
    connection.allreduce([torch.zeros(1)]).wait()
    connection._set_default_timeout(_COLLECTIVE_TIMEOUT)  # noqa: SLF001
    return connection


def _connect_nccl(store: Any, shard: Shard) -> Any:
    for name, value in _NCCL_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    options = _distributed.ProcessGroupNCCL.Options()
    options._timeout = _COLLECTIVE_TIMEOUT  # noqa: SLF001
    connection = _distributed.ProcessGroupNCCL(store, shard.rank, shard.size, options)
    # NCCL connects with the first sum.
    connection.allreduce([torch.zeros(1, device="cuda")]).wait()
    torch.cuda.synchronize()
    return connection
