"""Loading synthetic models: progress, resolved settings, refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.api import generate
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelError, RequestError
from engine.loading import LoadProgress, LoadRequest, load_engine
from engine.sampling_params import SamplingParams
from tests.support.models import VARIANTS, make_reference, write_folder
from tests.support.tokenizers import make_byte_level, write_tokenizer


@pytest.fixture(scope="module")
def request_for_tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadRequest:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_folder(make_reference(VARIANTS["llama tied"]), folder)
    write_tokenizer(folder, make_byte_level())
    config = EngineConfig(num_blocks=32, block_size=8)
    return LoadRequest(model_path=folder, config=config, cache_dir=folder.parent / "cache", device="cpu")


def load_quietly(request: LoadRequest) -> None:
    load_engine(request, lambda progress: None)


def test_progress_goes_through_all_stages_and_only_forward(request_for_tiny: LoadRequest) -> None:
    seen: list[LoadProgress] = []
    load_engine(request_for_tiny, seen.append)
    stages = list(dict.fromkeys(progress.stage for progress in seen))
    assert stages == ["header", "weights", "tokenizer", "kv_pool", "warm_up", "ready"]
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert sum(progress.stage == "weights" for progress in seen) > 10


def test_settings_are_resolved_against_the_model(request_for_tiny: LoadRequest) -> None:
    by_count = load_engine(request_for_tiny, lambda progress: None).core.config
    assert (by_count.num_blocks, by_count.max_model_len) == (32, 256)
    # 2 layers * 2 * 2 heads * 16 numbers * 4 bytes = 512 bytes a token, 4,096 a block
    by_memory = load_engine(
        replace(request_for_tiny, kv_memory_bytes=50_000), lambda progress: None
    ).core.config
    assert (by_memory.num_blocks, by_memory.max_model_len) == (12, 96)
    narrow = replace(request_for_tiny, kv_memory_bytes=50_000, dtype="bf16")
    assert load_engine(narrow, lambda progress: None).core.config.num_blocks == 24


def test_a_script_can_generate(request_for_tiny: LoadRequest) -> None:
    engine = load_engine(request_for_tiny, lambda progress: None)
    assert engine.model_name == "tiny"
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    together = generate(engine, ["hi", "hello there", "é"], greedy)
    alone = [generate(engine, [prompt], greedy)[0] for prompt in ["hi", "hello there", "é"]]
    assert together == alone
    drawn = SamplingParams(max_tokens=8, temperature=1.0, seed=3)
    assert generate(engine, ["hi"], drawn) == generate(engine, ["hi"], drawn)
    with pytest.raises(RequestError):
        generate(engine, ["hi", ""], greedy)
    assert not engine.core.has_work


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "q4"}, "native kernels"),
        ({"dtype": "int8"}, "native kernels"),
        ({"dtype": "fp16"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"num_threads": 0}, "num_threads"),
        ({"kv_memory_bytes": 1}, "kv_memory"),
        ({"kv_memory_bytes": 1 << 60, "config": EngineConfig(block_size=256)}, "memory"),
        ({"config": EngineConfig(max_num_seqs=0)}, "max_num_seqs"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    changes: dict[str, object], named: str, request_for_tiny: LoadRequest
) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        load_quietly(replace(request_for_tiny, **changes))  # type: ignore[arg-type]  # fields by name
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_cuda_without_cuda_is_refused(request_for_tiny: LoadRequest) -> None:
    with pytest.raises(ConfigError, match="cuda"):
        load_quietly(replace(request_for_tiny, device="cuda"))


def test_model_errors_come_through(request_for_tiny: LoadRequest, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such"):
        load_quietly(replace(request_for_tiny, model_path=tmp_path / "absent"))
    folder = write_folder(make_reference(VARIANTS["llama tied"]), tmp_path / "m")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_quietly(replace(request_for_tiny, model_path=folder))
