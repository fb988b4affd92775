"""The engines that ours is compared with: how each is driven, and in what it is installed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from bench.workload import CASES

DEFAULT_HOME = platformdirs.user_cache_path("pageglass") / "peers"


@dataclass(frozen=True)
class Home:
    """The folder in which peers and their models lie."""

    folder: Path

    @property
    def bf16(self) -> Path:
        """The default model as a Hugging Face folder in bf16."""
        return self.folder / "models/smollm2-135m-bf16"

    @property
    def w8a8(self) -> Path:
        """The same in int8, as vLLM reads it."""
        return self.folder / "models/smollm2-135m-w8a8"

    @property
    def llama_bin(self) -> Path:
        """Where llama.cpp's programs lie."""
        return self.folder / "llama-bin"

    def gguf(self, kind: str) -> Path:
        """The default model requantized to a type of llama.cpp's."""
        return self.folder / f"models/gguf/{kind}.gguf"

    def openvino(self, weights: str) -> Path:
        """The default model as OpenVINO reads it; `weights`: int8 or fp16."""
        return self.folder / f"models/ov-{weights}"

    def python(self, venv: str) -> Path:
        """The Python of an environment."""
        return self.folder / venv / "bin/python"


@dataclass(frozen=True)
class Peer:
    """One engine in one number format.

    `driver` is a module of this package, `venv` the environment whose Python runs it (None: our own).
    `settings` makes the driver's settings; `environment` (from the number of threads) is added to its
    process's. `server_driver` is used for W4, where the engine itself cannot take requests over time.
    `cases`: what it can run.
    """

    title: str
    driver: str
    venv: str | None
    settings: Callable[[Home], dict[str, Any]]
    environment: Callable[[Home, int], Mapping[str, str]] = lambda _home, _threads: {}
    server_driver: str | None = None
    cases: tuple[str, ...] = field(default=CASES)


_SYSTEM_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")


def _openvino(weights: str, properties: dict[str, str]) -> Peer:
    def settings(home: Home) -> dict[str, Any]:
        model = str(home.openvino(weights))
        return {"model": model, "properties": properties, "max_num_batched_tokens": 512}

    return Peer(f"OpenVINO GenAI {'bf16' if properties else weights}", "run_openvino", "ov", settings)


def _llama_cpp(kind: str) -> Peer:
    def settings(home: Home) -> dict[str, Any]:
        return {"file": str(home.gguf(kind)), "slots": 16}

    return Peer(f"llama.cpp {kind}", "run_llama_cpp", None, settings)


def _vllm(title: str, venv: str, model: Callable[[Home], Path]) -> Peer:
    def environment(home: Home, threads: int) -> dict[str, str]:
        unpacked = home.folder / "tcmalloc" / _SYSTEM_LIBRARIES.relative_to("/")
        name = "libtcmalloc_minimal.so.4"
        allocators = [folder / name for folder in (unpacked, _SYSTEM_LIBRARIES)]
        allocator = next((path for path in allocators if path.exists()), allocators[0])
        return {
            "LD_PRELOAD": f"{allocator}:{home.folder / venv / 'lib/libiomp5.so'}",
            "PATH": f"{home.folder / venv / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
        }

    return Peer(
        title,
        "run_vllm",
        venv,
        lambda home: {"model": str(model(home))},
        environment,
        server_driver="run_vllm_server",
    )


def _transformers() -> Peer:
    return Peer(
        "transformers bf16",
        "run_transformers",
        "hf",
        lambda home: {"model": str(home.bf16), "batch": 16},
        cases=("W1", "W2", "W3n", "W3p"),
    )


PEERS = {
    "openvino-int8": _openvino("int8", {}),
    "openvino-bf16": _openvino("fp16", {"INFERENCE_PRECISION_HINT": "bf16"}),
    "llamacpp-q4_0": _llama_cpp("Q4_0"),
    "llamacpp-q8_0": _llama_cpp("Q8_0"),
    "llamacpp-bf16": _llama_cpp("BF16"),
    "vllm-w8a8": _vllm("vLLM W8A8", "vllm", lambda home: home.w8a8),
    "vllm-bf16": _vllm("vLLM bf16", "vllm", lambda home: home.bf16),
    "vllm-zentorch-bf16": _vllm("vLLM + zentorch bf16", "vllm-zen", lambda home: home.bf16),
    "transformers": _transformers(),
}
