"""The default model through the whole engine, against `transformers` on the same dequantised weights."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from engine.config import EngineConfig
from engine.loading import LoadedEngine, LoadRequest, load_engine
from engine.sampling_params import SamplingParams
from engine.sequence import EngineRequest
from tests.support.models import load_reference, read_gguf

MT_BENCH = Path(__file__).parents[3] / "app" / "data" / "mt-bench.jsonl"
NUM_PROMPTS = 20
NUM_TOKENS = 64
MIN_GAP = 1e-3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def engine(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedEngine:
    request = LoadRequest(
        model_path=default_model_path,
        config=EngineConfig(num_blocks=512, max_num_seqs=NUM_PROMPTS),
        dtype="fp32",
        device="cpu",
        cache_dir=tmp_path_factory.mktemp("cache"),
    )
    return load_engine(request, lambda progress: None)


def read_messages() -> list[list[dict[str, str]]]:
    lines = MT_BENCH.read_text().splitlines()
    chosen = lines[:: len(lines) // NUM_PROMPTS][:NUM_PROMPTS]  # some of every category
    return [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in chosen]


def generate_greedily(engine: LoadedEngine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.core.add_request(
            EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling_params=params)
        )
    generated: list[list[int]] = [[] for _ in prompts]
    while engine.core.has_work:
        for output in engine.core.step().outputs:
            generated[int(output.request_id)].append(output.token_id)
    return generated


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> Iterator[PreTrainedModel]:
    yield load_reference(default_model_path)
    read_gguf.cache_clear()


@torch.inference_mode()
def test_greedy_tokens_equal_those_of_transformers(engine: LoadedEngine, reference: PreTrainedModel) -> None:
    prompts = [engine.tokenizer.encode_chat(messages) for messages in read_messages()]
    generated = generate_greedily(engine, prompts)
    disagreements = []
    for index, (prompt, answer) in enumerate(zip(prompts, generated, strict=True)):
        assert len(answer) == NUM_TOKENS
        # One forward over prompt and answer: if its best token after every prefix is the answer's next
        # token, then generating token by token gives the same answer (by induction over the tokens).
        output = reference(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1)
        logits = output.logits[0, :-1].float()
        best, ids = logits.topk(2)
        for position in (ids[:, 0] != torch.tensor(answer)).nonzero().flatten().tolist():
            gap = (best[position, 0] - best[position, 1]).item()
            near = f"{answer[position]}, reference {ids[position].tolist()}, gap {gap:g}"
            print(f"prompt {index}, token {position}: {near}")  # noqa: T201 - ties are shown, not hidden
            disagreements += [(index, position, gap)] if gap >= MIN_GAP else []
    assert not disagreements


def test_prompts_have_the_ids_that_transformers_gives_them(
    engine: LoadedEngine, default_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gguf.GGUFReader", lambda path: read_gguf(Path(path)))  # what the reference read
    reference = AutoTokenizer.from_pretrained(
        str(default_model_path.parent), gguf_file=default_model_path.name
    )
    for messages in read_messages():
        encoded = reference.apply_chat_template(messages, add_generation_prompt=True)
        assert engine.tokenizer.encode_chat(messages) == encoded["input_ids"]
        text = messages[0]["content"]
        token_ids = engine.tokenizer.encode(text)
        assert token_ids == reference(text)["input_ids"]
        assert engine.tokenizer.decode(token_ids) == text


def test_a_known_prompt_has_its_golden_length(engine: LoadedEngine) -> None:
    assert len(engine.tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == 31
    assert engine.tokenizer.encode("hi") == [6004]  # this model has no begin token
    assert engine.tokenizer.eos_token_ids == {2}
