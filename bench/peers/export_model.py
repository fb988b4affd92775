"""Writes a GGUF model as folders that other engines read, run by the Python of one of them.

`python -m bench.peers.export_model GGUF FOLDER --as bf16|w8a8`. bf16: a Hugging Face folder. w8a8: the same
in the compressed-tensors format, with int8 weights (one scale a row) and activations (one scale a token).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

_LARGEST_INT8 = 127
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}


def export_bf16(gguf: Path, folder: Path) -> None:
    """Write the Hugging Face folder, as a plain Llama model without a trace of the quantization."""
    source: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    known = source.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "transformers_version", "dtype", "architectures"):
        known.pop(name, None)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**known))
    model.load_state_dict(source.state_dict(), strict=False)
    model.tie_weights()
    model.generation_config = source.generation_config
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)


def export_w8a8(gguf: Path, folder: Path) -> None:
    """Write the bf16 folder with quantized weights."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - after transformers has written with it

    export_bf16(gguf, folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            weights, scales = _quantize(tensor.float())
            tensors[name], tensors[name + "_scale"] = weights, scales
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_INT8, "strategy": "channel", "dynamic": False},
                "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
            }
        },
    }
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")


def _quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 weights (rows, columns) and bf16 scales (rows, 1)."""
    scales = (weights.abs().amax(1, keepdim=True) / _LARGEST_INT8).clamp(min=1e-8)  # (rows, 1) float32
    rounded = torch.round(weights / scales).clamp(-_LARGEST_INT8, _LARGEST_INT8)  # (rows, columns) float32
    return rounded.to(torch.int8), scales.to(torch.bfloat16)


def main() -> None:
    """Export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--as", dest="form", choices=("bf16", "w8a8"), required=True)
    options = parser.parse_args()
    (export_bf16 if options.form == "bf16" else export_w8a8)(options.gguf, options.folder)


if __name__ == "__main__":
    main()
