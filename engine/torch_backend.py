"""Loads a model for torch, on the CPU or on CUDA. Importing this imports torch."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config import EngineConfig
from engine.engine_info import EngineInfo
from engine.errors import ConfigError, EngineInvariantError
from engine.machine import total_memory_bytes
from engine.model.check import ModelFiles
from engine.model.decoder import Decoder, DecoderWeights
from engine.model.shards import Shard, Unsummed
from engine.model.weight_reader import Report
from engine.model.weights import load_weights
from engine.parallel.launch import start_team
from engine.parallel.runner import TensorParallelRunner
from engine.parallel.team import PoolSize, Team
from engine.run_plan import RunOptions
from engine.runner.arithmetic import make_arithmetic
from engine.runner.cuda_graphs import list_buckets
from engine.runner.cuda_runner import CudaRunner
from engine.runner.gpu import CudaGpu, Gpu
from engine.runner.launcher import LaunchSizes
from engine.runner.memory_plan import MemoryUse, plan_kv_memory, size_graphs
from engine.runner.memory_profile import profile_steps
from engine.runner.smaller_steps import is_out_of_memory
from engine.runner.torch_facts import DTYPES, as_clause
from engine.runner.torch_runner import TorchRunner

logger = logging.getLogger(__name__)


def open_gpu() -> Gpu:
    """Return the first GPU; raises `ConfigError` if it cannot be used, as when others have all of it."""
    try:
        return CudaGpu(torch.device("cuda", 0))
    except RuntimeError as error:
        reason = as_clause(str(error).partition("\n")[0])
        raise ConfigError(
            f"device is cuda, but the GPU cannot be used: {reason}; use cpu, or choose another GPU with "
            "CUDA_VISIBLE_DEVICES."
        ) from error


class TorchBackend:
    """A model on its way into torch."""

    def __init__(self, files: ModelFiles, info: EngineInfo, options: RunOptions) -> None:
        """Read nothing yet; sets torch's threads, or takes the GPU.

        Raises `ConfigError` if the model cannot be shared out to so many processes.
        """
        self._files = files
        self._info = info
        self._options = options
        self._dtype = DTYPES[info.dtype]
        self._shard = Shard(0, info.tensor_parallel_size)
        self._share = self._shard.config(files.config)
        self._decoder: Decoder | None = None
        self._weights: DecoderWeights | None = None
        self._team: Team | None = None
        self._gpu: Gpu | None = None
        self._device = torch.device("cpu")
        if info.device == "cuda":
            self._gpu = open_gpu()
            self._device = self._gpu.torch_device
            self._free_at_start = self._gpu.free_bytes
        if info.threads:
            torch.set_num_threads(info.threads)

    @property
    def available_bytes(self) -> int:
        """Memory of the machine, or what is free on the GPU."""
        return total_memory_bytes() if self._gpu is None else self._gpu.free_bytes

    @property
    def weight_bytes(self) -> int:
        """What the weights take: all of them in the machine's memory, or this process's share on its GPU."""
        num_shares = 1 if self._gpu is None else self._shard.size
        return -(-self._files.info.num_parameters // num_shares) * self._dtype.itemsize

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Return what one block takes over all layers; of several GPUs, on the first, which has most."""
        config = self._files.config if self._gpu is None else self._share
        return config.kv_bytes_per_token(self._dtype.itemsize) * block_size

    def load_weights(self, config: EngineConfig, on_share: Report) -> None:
        """Read all weights; of several processes each reads its share. Raises `RankError` if one cannot."""
        group = None
        if self._shard.size > 1:
            group = Unsummed(self._shard)  # nobody else has a KV pool yet
            self._team = start_team(self._files, self._info, self._dtype)
            self._abandon = weakref.finalize(self, self._team.close)  # in case that loading does not get on
        with torch.inference_mode(), _memory_errors():
            weights = load_weights(self._files, self._dtype, self._device, on_share, self._shard)
            arithmetic = make_arithmetic(
                self._info.attention, self._files.config, self._dtype, self._device, group
            )
            self._decoder = Decoder(self._files.config, weights, config.max_model_len, arithmetic)
            self._weights = weights
        if self._team is not None:
            self._team.wait_until_loaded(lambda: on_share(1.0))

    def find_kv_memory(self, config: EngineConfig) -> int | None:
        """Return the bytes that the KV pool may have on the GPU, found by computing the largest steps.

        None on the CPU, where it has what was asked for. `config` has the limits of a step. Raises
        `ConfigError` if there is no room for a pool.
        """
        gpu, decoder = self._gpu, self._take_decoder()
        if gpu is None:
            return None
        with _memory_errors():
            steps = profile_steps(decoder, gpu, config)
        gpu.begin_measuring()
        graphs = 0
        has_graphs = self._options.cuda_graphs and self._shard.size == 1
        if has_graphs and decoder.arithmetic.attention.is_capturable:
            logits_bytes = self._files.config.vocab_size * self._dtype.itemsize
            graphs = size_graphs(list_buckets(config.max_num_seqs), logits_bytes, steps.decode)
        use = MemoryUse(
            total=gpu.total_bytes,
            free_at_start=self._free_at_start,
            held=max(0, self._free_at_start - gpu.free_bytes),
            step=steps.any_step,
            graphs=graphs,
        )
        kv_bytes = plan_kv_memory(
            use, self._options.gpu_memory_utilization, self.kv_bytes_per_block(config.block_size)
        )
        logger.info("%s: %s bytes for keys and values", use, f"{kv_bytes:,}")
        return kv_bytes

    def make_runner(
        self, config: EngineConfig, eos_token_ids: frozenset[int]
    ) -> TorchRunner | CudaRunner | TensorParallelRunner:
        """Return the runner of the loaded model; allocates KV pool and host tier."""
        with _memory_errors():
            if self._team is not None:
                return self._make_parallel_runner(self._team, config, eos_token_ids)
            if self._gpu is not None:
                return self._make_cuda_runner(self._gpu, config, eos_token_ids)
            return TorchRunner(
                self._take_decoder(),
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                eos_token_ids=eos_token_ids,
                num_host_blocks=config.num_host_blocks,
            )

    def _make_parallel_runner(
        self, team: Team, config: EngineConfig, eos_token_ids: frozenset[int]
    ) -> TensorParallelRunner:
        assert self._weights is not None, "the weights are not loaded"
        pool = PoolSize(config.num_blocks, config.block_size, config.max_model_len)
        runner = TensorParallelRunner(team, self._files.config, self._weights, pool, eos_token_ids)
        self._abandon.detach()
        return runner

    def _make_cuda_runner(self, gpu: Gpu, config: EngineConfig, eos_token_ids: frozenset[int]) -> CudaRunner:
        decoder = self._take_decoder()
        with torch.inference_mode():
            cache = decoder.make_cache(config.num_blocks, config.block_size)
        sizes = LaunchSizes(
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
        )
        return CudaRunner(
            decoder,
            cache,
            gpu.make_device(),
            sizes,
            gpu.make_blocks(cache.storage, config.num_host_blocks),
            eos_token_ids=eos_token_ids,
            computes_ahead=self._options.async_scheduling,
            captures_graphs=self._options.cuda_graphs,
        )

    def _take_decoder(self) -> Decoder:
        if self._decoder is None:
            raise EngineInvariantError("the weights are not loaded")
        return self._decoder


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn torch's several out-of-memory errors into Python's."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise
