"""How long the steps of a run take at least on a device: the roofline of `bench.costs` over two ceilings."""

from collections.abc import Iterable
from pathlib import Path

from bench.costs import Cost, ModelCosts, Work
from bench.device.ceilings import Ceilings
from bench.device.shapes import list_weights
from engine.model.check import ModelFiles, ModelInfo
from engine.model.config import ModelConfig
from engine.model.tensor_info import TensorInfo
from engine.model.tensor_names import match_tensors
from engine.records import StepRecord

_BYTES = 2  # bf16


def costs_of(config: ModelConfig) -> ModelCosts:
    """Return what steps of a model cost whose weights, keys and values are bf16."""
    return ModelCosts(_describe_files(config), "bf16", "bf16")


def floors_s(costs: ModelCosts, records: Iterable[StepRecord], ceilings: Ceilings) -> list[float]:
    """Return the seconds that each step takes at least.

    All its bytes at the bandwidth of a copy, or all its operations at the rate of a product, if that is more.
    """
    return [_floor_s(costs, record, ceilings) for record in records]


def is_full_decode(record: StepRecord, num_seqs: int) -> bool:
    """Whether a step computed one token for each of so many sequences and nothing else."""
    return len(record.batch) == num_seqs and all(entry.is_decode for entry in record.batch)


def _floor_s(costs: ModelCosts, record: StepRecord, ceilings: Ceilings) -> float:
    batch = [
        Work(entry.num_computed_before, entry.num_scheduled, entry.token_id >= 0) for entry in record.batch
    ]
    if not batch:
        return 0.0
    total = sum(costs.of_step(batch).values(), Cost())
    return ceilings.floor_s(total.num_bytes, total.operations)


def _describe_files(config: ModelConfig) -> ModelFiles:
    """Return the headers of a file with the weights of that shape."""
    nowhere = Path()
    tensors = {name: TensorInfo(name, shape, "BF16", nowhere, 0, 0) for name, shape in list_weights(config)}
    info = ModelInfo(
        path=nowhere,
        name=config.architecture,
        file_format="safetensors",
        architecture=config.architecture,
        storage="BF16",
        num_parameters=sum(tensor.num_elements for tensor in tensors.values()),
        num_bytes=_BYTES * sum(tensor.num_elements for tensor in tensors.values()),
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
    )
    return ModelFiles(info, config, match_tensors(config, tensors, is_gguf=False), None)
