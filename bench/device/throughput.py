"""Decode and prefill speed of a SmolLM2-sized model with random weights, against the memory's own speed.

Prints one JSON object. Nothing is asserted: figures are read, not tested. Run it through `check.sh`, or
here with `--device cpu --num-layers 2` to see that it works.
"""

import argparse
import importlib.util
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.model.config import ModelConfig, RopeScaling
from engine.model.decoder import Decoder, DecoderWeights, LayerWeights
from engine.model.layers import Linear
from engine.runner.torch_runner import TorchRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.sequence import EngineRequest, Sequence

SMOLLM2 = ModelConfig(
    architecture="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position=8192,
    rope_theta=100_000.0,
    rope_scaling=RopeScaling(),
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    eos_token_ids=frozenset({2}),
)
BLOCK_SIZE = 16
CONTEXT = 512
DECODE_BATCHES = (1, 16, 64, 256)
PREFILL_TOKENS = 4096
GENERATED = 64
WARM_UPS, REPEATS = 3, 10
COPY_BYTES = 1 << 30


def main() -> None:
    """Measure and print."""
    options = _parse()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    config = replace(SMOLLM2, num_layers=options.num_layers)
    torch.manual_seed(0)
    with torch.inference_mode():
        decoder = Decoder(config, _random_weights(config, dtype, device), config.max_position)
        num_blocks = max(DECODE_BATCHES) * (CONTEXT // BLOCK_SIZE) + PREFILL_TOKENS // BLOCK_SIZE
        runner = TorchRunner(decoder, num_blocks=num_blocks, block_size=BLOCK_SIZE, eos_token_ids=frozenset())
        copy_bytes_per_s = _measure_copy(device)
        report = {
            "versions": _versions(device),
            "model": {"num_layers": config.num_layers, "dtype": options.dtype},
            "copy_gb_per_s": round(copy_bytes_per_s / 1e9, 1),
            "decode": [_decode(runner, config, dtype, n, copy_bytes_per_s) for n in DECODE_BATCHES],
            "prefill": _prefill(runner),
            "transformers": _measure_transformers(config, device, dtype),
        }
    print(json.dumps(report, indent=1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--num-layers", type=int, default=SMOLLM2.num_layers)
    return parser.parse_args()


def _versions(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "device": name,
    }


def _random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device) * 0.02).to(dtype)

    hidden, mlp = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    norm = torch.ones(hidden, dtype=dtype, device=device)
    layers = [
        LayerWeights(
            attn_norm=norm,
            qkv=Linear(random(query + 2 * config.kv_size, hidden)),
            output=Linear(random(hidden, query)),
            mlp_norm=norm,
            gate_up=Linear(random(2 * mlp, hidden)),
            down=Linear(random(hidden, mlp)),
        )
        for _ in range(config.num_layers)
    ]
    embedding = random(config.vocab_size, hidden)
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm, head=Linear(embedding))


def _measure(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of one run."""
    times = []
    for _ in range(WARM_UPS + REPEATS):
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        times.append(time.perf_counter() - started)
    return sorted(times[WARM_UPS:])[REPEATS // 2]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measure_copy(device: torch.device) -> float:
    """Return how many bytes per second a copy reads and writes: what memory can do here."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES // 8
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _measure(lambda: target.copy_(source), device)


def _make_share(first_block: int, computed: int, count: int) -> ScheduledSequence:
    params = SamplingParams(temperature=0.0)
    total = computed + count
    request = EngineRequest(request_id="r", prompt_token_ids=[1] * total, sampling_params=params)
    sequence = Sequence(0, request, max_tokens=1)
    sequence.block_table = list(range(first_block, first_block - (-total // BLOCK_SIZE)))
    return ScheduledSequence(sequence, computed, count)


def _decode(
    runner: TorchRunner, config: ModelConfig, dtype: torch.dtype, num_seqs: int, copy_bytes_per_s: float
) -> dict[str, Any]:
    blocks = CONTEXT // BLOCK_SIZE
    shares = [_make_share(i * blocks, CONTEXT - 1, 1) for i in range(num_seqs)]
    output = SchedulerOutput(shares)
    seconds = _measure(lambda: runner.execute(output), runner.device)
    layer = config.hidden_size * (2 * config.num_heads * config.head_dim + 2 * config.kv_size)
    layer += 3 * config.hidden_size * config.intermediate_size
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    least_bytes = weights * dtype.itemsize + num_seqs * CONTEXT * config.kv_bytes_per_token(dtype.itemsize)
    return {
        "num_seqs": num_seqs,
        "context": CONTEXT,
        "step_ms": round(seconds * 1e3, 3),
        "tokens_per_s": round(num_seqs / seconds, 1),
        "least_bytes": least_bytes,
        "share_of_memory_roofline": round(least_bytes / copy_bytes_per_s / seconds, 4),
    }


def _prefill(runner: TorchRunner) -> dict[str, Any]:
    output = SchedulerOutput([_make_share(0, 0, PREFILL_TOKENS)])
    seconds = _measure(lambda: runner.execute(output), runner.device)
    return {
        "tokens": PREFILL_TOKENS,
        "ms": round(seconds * 1e3, 2),
        "tokens_per_s": round(PREFILL_TOKENS / seconds, 1),
    }


def _measure_transformers(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Measure `generate` of the same shape, batch and length, where transformers is installed."""
    if importlib.util.find_spec("transformers") is None:
        return {"skipped": "not installed"}
    import transformers  # noqa: PLC0415 - optional on a device machine

    hf_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        max_position_embeddings=config.max_position,
        tie_word_embeddings=True,
    )
    model: Any = transformers.LlamaForCausalLM(hf_config).to(device, dtype).eval()
    num_seqs = 64 if device.type == "cuda" else 2
    prompts = torch.ones((num_seqs, CONTEXT), dtype=torch.int64, device=device)

    def generate(num_tokens: int) -> Callable[[], object]:
        settings = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
        return lambda: model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)

    generate(2)()
    started = time.perf_counter()
    generate(1)()
    _wait(device)
    prefilled = time.perf_counter()
    generate(GENERATED + 1)()
    _wait(device)
    seconds = time.perf_counter() - prefilled - (prefilled - started)
    return {
        "version": transformers.__version__,
        "num_seqs": num_seqs,
        "decode_tokens_per_s": round(num_seqs * GENERATED / seconds, 1),
        "step_ms": round(seconds / GENERATED * 1e3, 3),
    }


if __name__ == "__main__":
    main()
