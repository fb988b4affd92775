"""The native runner under the real engine: pressure, prefix hits and batches change no answer, to the bit."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import EngineInvariantError
from engine.kernels.cpu.library import Want
from engine.model.check import ModelFiles, open_model
from engine.model.uniform import uniform
from engine.records import Preempted
from engine.runner.native_runner import NativeRunner, make_step_batch
from engine.sampling_params import SamplingParams
from engine.scheduling.output import ScheduledSequence, SchedulerOutput
from engine.sequence import EngineRequest, Sequence
from tests.support.engine_runs import GREEDY, NUM_TOKENS, make_requests, run
from tests.support.kernels import load_native, make_sizes
from tests.support.models import VARIANTS, VOCAB_SIZE, make_reference, write_folder

BLOCK_SIZE = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("model")
    return open_model(write_folder(make_reference(VARIANTS["llama tied"]), folder))


def make_runner(
    files: ModelFiles, num_blocks: int, *, kv_dtype: str = "bf16", num_threads: int = 1
) -> NativeRunner:
    sizes = make_sizes(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, kv_dtype=kv_dtype, num_threads=num_threads
    )
    return NativeRunner(load_native(files, sizes), eos_token_ids=frozenset())


def make_core(runner: NativeRunner, *, max_tokens: int = 40, has_cache: bool = True) -> EngineCore:
    config = EngineConfig(
        num_blocks=runner.model.sizes.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_num_batched_tokens=max_tokens,
        max_model_len=96,
        enable_prefix_caching=has_cache,
    )
    return EngineCore(config, runner)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_same_alone_batched_chunked_preempted_and_from_the_prefix_cache(
    files: ModelFiles, seed: int, kv_dtype: str
) -> None:
    requests = make_requests(seed)
    roomy_runner = make_runner(files, 256, kv_dtype=kv_dtype)
    alone = {
        request.request_id: run(make_core(roomy_runner, has_cache=False), [request])[0][request.request_id]
        for request in requests
    }
    assert all(len(answer) == NUM_TOKENS for answer in alone.values())
    together, _ = run(make_core(roomy_runner, max_tokens=512), requests)
    chunked, _ = run(
        make_core(make_runner(files, 256, kv_dtype=kv_dtype, num_threads=2), max_tokens=9), requests
    )
    tight, results = run(make_core(make_runner(files, 20, kv_dtype=kv_dtype)), requests)
    kinds = Counter(type(event) for result in results for event in result.record.events)
    assert kinds[Preempted] > 0
    assert any(output.num_cached_tokens for result in results for output in result.outputs)
    assert together == alone
    assert chunked == alone
    assert tight == alone


def test_a_step_without_work_computes_nothing(files: ModelFiles) -> None:
    output = make_runner(files, 4).execute(SchedulerOutput())
    assert (output.token_ids, output.forward_ns, output.sample_ns) == ([], 0, 0)


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_warming_up_works_for_any_block_size(files: ModelFiles, block_size: int) -> None:
    model = load_native(files, make_sizes(num_blocks=1, block_size=block_size))
    NativeRunner(model, eos_token_ids=frozenset()).warm_up()


def test_after_a_failed_step_nothing_of_the_old_kv_shows(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(9)[:3]
    expected, _ = run(make_core(make_runner(files, 64)), requests)
    runner = make_runner(files, 64)
    core = make_core(runner)
    core.add_requests(requests)
    core.step()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("The native kernels failed: injected")

    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "step", fail)
        with pytest.raises(RuntimeError, match="injected"):
            core.step()
    core.fail_all("RuntimeError")
    runner.model.view_kv()[:] = 0xFF  # NaN in every number of a bf16 pool
    answers, _ = run(core, requests)
    assert answers == expected


def test_the_logits_of_a_text_decide_its_greedy_answer(files: ModelFiles) -> None:
    runner = make_runner(files, 64)
    [request] = make_requests(4)[:1]
    answers, _ = run(make_core(runner), [request])
    text = request.prompt_token_ids + answers["0"]
    logits = runner.logits(text)
    assert logits.shape == (len(text), VOCAB_SIZE)
    assert logits.dtype == np.float32
    first = len(request.prompt_token_ids) - 1
    assert logits[first:-1].argmax(-1).tolist() == answers["0"]


def make_share(
    token_ids: list[int], table: list[int], start: int, count: int, params: SamplingParams = GREEDY
) -> ScheduledSequence:
    request = EngineRequest(
        request_id="r", prompt_token_ids=token_ids, sampling_params=params, choice_index=3
    )
    sequence = Sequence(0, request, max_tokens=1)
    sequence.block_table = table
    return ScheduledSequence(sequence, start, count)


def test_a_batch_says_what_the_schedule_says() -> None:
    drawn = SamplingParams(temperature=0.5, top_k=7, top_p=0.25, seed=11)
    batch = make_step_batch(
        [
            make_share([1, 2, 3, 4, 5], [7, 3], 0, 5),
            make_share(list(range(10, 20)), [1, 2, 9], 9, 1, drawn),
            make_share([30, 31, 32, 33], [5], 1, 2, drawn),
        ],
        block_size=4,
    )
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 19, 31, 32]
    assert batch.num_computed.tolist() == [0, 9, 1]
    assert batch.num_scheduled.tolist() == [5, 1, 2]
    assert batch.tables.tolist() == [7, 3, 1, 2, 9, 5]
    assert batch.table_starts.tolist() == [0, 2, 5, 6]
    assert list(batch.wants) == [Want.GREEDY, Want.DRAW, Want.NOTHING]
    assert (batch.temperatures[1], batch.top_ks[1], batch.top_ps[1]) == (0.5, 7, 0.25)
    assert batch.uniforms.tolist() == [0.0, uniform(11, 3, 0), 0.0]


def test_a_missing_block_is_a_bug_that_is_noticed() -> None:
    with pytest.raises(EngineInvariantError, match="no block"):
        make_step_batch([make_share([0] * 6, [4], 4, 1)], block_size=4)


def test_memory_is_given_back(files: ModelFiles, tmp_path: Path) -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    sizes = make_sizes(num_blocks=20_000)
    sizes_mib = 20
    for _ in range(2):
        model = load_native(files, sizes)
        before = resident_bytes()
        model.view_kv()[: sizes_mib << 20] = 1
        assert resident_bytes() - before > (sizes_mib - 4) << 20
        model.close()
        assert resident_bytes() - before < 4 << 20


def test_the_smallest_top_p_is_a_greedy_draw_and_disturbs_nobody(files: ModelFiles) -> None:
    requests = make_requests(3)[:3]
    tiny = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=1e-310, seed=1)
    greedy = EngineRequest(request_id="g", prompt_token_ids=[5, 6, 7], sampling_params=GREEDY)
    smallest = EngineRequest(request_id="t", prompt_token_ids=[5, 6, 7], sampling_params=tiny)
    expected, _ = run(make_core(make_runner(files, 64)), [*requests, greedy])
    answers, _ = run(make_core(make_runner(files, 64)), [*requests, smallest])
    assert answers.pop("t") == expected.pop("g")
    assert answers == expected
