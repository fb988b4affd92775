"""A checked model file to a `NativeModel`: tensors as they lie in the file. No torch."""

from collections.abc import Iterable

import numpy as np

from engine.kernels.cpu.library import (
    Kind,
    Linear,
    NativeLibrary,
    NativeModel,
    NativeSizes,
    Storage,
    StoredTensor,
    Vector,
)
from engine.kernels.cpu.suitability import FOUR_BIT_TYPES
from engine.model.check import ModelFiles
from engine.model.rotary import rotary_table
from engine.model.stored_numbers import Floats, to_float32, view_bytes
from engine.model.tensor_names import FREQ_FACTORS
from engine.model.weight_reader import Report, WeightReader

_LINEAR_WEIGHTS = {
    Linear.Q: ("q.weight",),
    Linear.K: ("k.weight",),
    Linear.V: ("v.weight",),
    Linear.O: ("o.weight",),
    Linear.GATE_UP: ("gate.weight", "up.weight"),
    Linear.DOWN: ("down.weight",),
}
_VECTORS = {
    Vector.ATTN_NORM: "attn_norm.weight",
    Vector.MLP_NORM: "mlp_norm.weight",
    Vector.Q_NORM: "q_norm.weight",
    Vector.K_NORM: "k_norm.weight",
    Vector.Q_BIAS: "q.bias",
    Vector.K_BIAS: "k.bias",
    Vector.V_BIAS: "v.bias",
    Vector.O_BIAS: "o.bias",
}


def pack_model(
    library: NativeLibrary, files: ModelFiles, sizes: NativeSizes, on_progress: Report
) -> NativeModel:
    """Return a model that is ready to step. Raises `ModelError` for a tensor that cannot be read.

    With dtype q4 the weights that are stored in four bits stay exactly as they are and all others become
    int8 in groups of 32 (those stored as Q8_0 exactly); with other types all weights are of that type.
    """
    model = NativeModel(library, files.config, sizes)
    try:
        _Packer(model, files, on_progress).pack()
    except BaseException:
        model.close()
        raise
    return model


class _Packer:
    def __init__(self, model: NativeModel, files: ModelFiles, on_progress: Report) -> None:
        self.model = model
        self.config = files.config
        self.reader = WeightReader(files, on_progress)

    def pack(self) -> None:
        self.set_rotary()
        # The largest first: once it is in, memory suffices for the rest's temporary copies.
        if self.config.tied_embeddings:
            self.set_linear(0, Linear.HEAD, ["embed.weight"])
        else:
            self.set_linear(0, Linear.HEAD, ["head.weight"])
            self.set_linear(0, Linear.EMBED, ["embed.weight"])
        for layer in range(self.config.num_layers):
            prefix = f"layers.{layer}."
            for linear, names in _LINEAR_WEIGHTS.items():
                self.set_linear(layer, linear, [prefix + name for name in names])
            for vector, name in _VECTORS.items():
                if prefix + name in self.reader:
                    self.set_vector(layer, vector, prefix + name)
        self.set_vector(0, Vector.FINAL_NORM, "norm.weight")
        self.model.finish()

    def set_linear(self, layer: int, linear: Linear, names: list[str]) -> None:
        tensors = [self.read(name) for name in names]
        if len({tensor.storage for tensor in tensors}) > 1:  # they are packed together, so as one type
            tensors = [self.read(name, as_float32=True) for name in names]
        self.model.set_linear(layer, linear, self.choose_kind(tensors[0].storage), tensors)
        self.count(names)

    def choose_kind(self, storage: Storage) -> Kind:
        match self.model.sizes.dtype:
            case "bf16":
                return Kind.BF16
            case "fp32":
                return Kind.F32
            case "q4" if storage.name in FOUR_BIT_TYPES:
                return Kind.Q4
            case _:
                return Kind.INT8

    def set_vector(self, layer: int, vector: Vector, name: str) -> None:
        self.model.set_vector(layer, vector, self.read(name, as_float32=True))
        self.count([name])

    def set_rotary(self) -> None:
        factors = None
        if FREQ_FACTORS in self.reader:
            factors = self.read_float32(FREQ_FACTORS)  # (head_dim / 2) float32
            self.count([FREQ_FACTORS])
        self.model.set_rotary(*rotary_table(self.config, self.model.sizes.num_positions, factors))

    def read(self, name: str, *, as_float32: bool = False) -> StoredTensor:
        """Return a tensor as it is stored, or as float32 if asked to or if no kernel reads its type."""
        tensor, mapped = self.reader.locate(name)
        rows, columns = (*tensor.shape, 1)[:2]
        heads = self.rotary_heads(name)
        if as_float32 or tensor.dtype not in Storage.__members__:
            return StoredTensor(self.read_float32(name), Storage.F32, rows, columns, heads)
        return StoredTensor(view_bytes(tensor, mapped), Storage[tensor.dtype], rows, columns, heads)

    def read_float32(self, name: str) -> Floats:
        tensor, mapped = self.reader.locate(name)
        return np.ascontiguousarray(to_float32(tensor, view_bytes(tensor, mapped)))  # tensor.shape float32

    def rotary_heads(self, name: str) -> int:
        """Return how many heads a tensor's rows belong to where the file has them interleaved, else 0."""
        if not self.reader.is_interleaved:
            return 0
        part = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
        return {"q": self.config.num_heads, "k": self.config.num_kv_heads}.get(part, 0)

    def count(self, names: Iterable[str]) -> None:
        for name in names:
            self.reader.count(name)
