"""The runner under the real engine: pressure, prefix hits and batches change no answer."""

from collections.abc import Callable

import msgspec
import pytest
import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.attention import KVCache
from engine.model.decoder import Decoder
from engine.model.sampler import Draw, sample
from engine.model.step import ForwardBatch
from engine.records import Preempted
from engine.runner import torch_runner
from engine.runner.smaller_steps import is_out_of_memory
from engine.runner.torch_runner import TorchRunner
from engine.sampling_params import SamplingParams
from engine.scheduling.output import SchedulerOutput
from engine.sequence import EngineRequest
from tests.support.engine_runs import NUM_TOKENS, make_requests, run
from tests.support.models import VARIANTS, load_decoder, make_reference, write_folder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.set_num_threads(1)
    return load_decoder(
        write_folder(make_reference(VARIANTS["llama tied"]), tmp_path_factory.mktemp("model"))
    )


def make_core(decoder: Decoder, num_blocks: int, max_num_seqs: int = 8) -> EngineCore:
    config = EngineConfig(
        num_blocks=num_blocks,
        block_size=8,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=40,
        max_model_len=96,
    )
    runner = TorchRunner(
        decoder, num_blocks=num_blocks, block_size=config.block_size, eos_token_ids=frozenset()
    )
    return EngineCore(config, runner)


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_same_alone_batched_preempted_and_from_the_prefix_cache(
    decoder: Decoder, seed: int
) -> None:
    requests = make_requests(seed)
    alone = {
        request.request_id: run(make_core(decoder, 64), [request])[0][request.request_id]
        for request in requests
    }
    roomy, _ = run(make_core(decoder, 256), requests)
    tight, results = run(make_core(decoder, 20), requests)
    events = [event for result in results for event in result.record.events]
    assert sum(isinstance(event, Preempted) for event in events) > 0
    assert any(output.num_cached_tokens for result in results for output in result.outputs)
    assert all(len(answer) == NUM_TOKENS for answer in alone.values())
    assert roomy == alone
    assert tight == alone


def test_a_step_without_work_computes_nothing(decoder: Decoder) -> None:
    runner = TorchRunner(decoder, num_blocks=4, block_size=8, eos_token_ids=frozenset())
    output = runner.execute(SchedulerOutput())
    assert (output.token_ids, output.forward_ns, output.sample_ns) == ([], 0, 0)


@pytest.mark.parametrize("block_size", [1, 2, 16, 256])
def test_warming_up_works_for_any_block_size(decoder: Decoder, block_size: int) -> None:
    TorchRunner(decoder, num_blocks=1, block_size=block_size, eos_token_ids=frozenset()).warm_up()


def test_warming_up_stays_within_the_longest_sequence(decoder: Decoder) -> None:
    short = Decoder(decoder.config, decoder._weights, num_positions=4)
    TorchRunner(short, num_blocks=1, block_size=16, eos_token_ids=frozenset()).warm_up()


def test_after_a_reset_nothing_of_the_old_kv_shows(decoder: Decoder) -> None:
    requests = make_requests(9)[:3]
    core = make_core(decoder, 64)
    expected, _ = run(make_core(decoder, 64), requests)
    for request in requests:
        core.add_request(request)
    core.step()
    core.fail_all("injected")
    assert isinstance(core.runner, TorchRunner)
    for part in (*core.runner._cache.keys, *core.runner._cache.values):
        part.fill_(torch.nan)
    answers, _ = run(core, requests)
    assert answers == expected


def test_a_request_that_cannot_be_sampled_ends_alone(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def picky_sample(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
        if any(draw.params.seed == 13 for draw in draws):
            raise OverflowError("no such seed")
        return sample(logits, draws)

    core = make_core(decoder, num_blocks=64)
    requests = make_requests(0)[:4]
    core.add_requests(requests)
    expected = collect(core)
    monkeypatch.setattr(torch_runner, "sample", picky_sample)
    bad = SamplingParams(max_tokens=NUM_TOKENS, seed=13)
    core.add_requests(
        [*requests, EngineRequest(request_id="bad", prompt_token_ids=[1, 2], sampling_params=bad)]
    )
    got = collect(core)
    assert got.pop("bad") == ([], "error")
    assert got == expected
    assert "cannot be sampled" in caplog.text


# ---- too little memory ------------------------------------------------------------------------------


def limit_rows(
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    is_too_much: Callable[[ForwardBatch], bool],
    error: Exception | None = None,
) -> list[int]:
    """Let the model fail before it has written anything; return the rows of the failed steps."""
    real, failed = decoder.forward, []

    def forward(batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        if is_too_much(batch):
            failed.append(len(batch.input_ids))
            raise error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(batch, cache)

    monkeypatch.setattr(decoder, "forward", forward)
    return failed


@pytest.mark.parametrize(
    "error",
    [
        None,
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"
        ),
    ],
)
def test_a_step_that_needs_too_much_memory_is_computed_in_parts(
    decoder: Decoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
) -> None:
    requests = make_requests(1)
    expected, _ = run(make_core(decoder, 64), requests)
    failed = limit_rows(decoder, monkeypatch, lambda batch: len(batch.input_ids) > 5, error)
    answers, _ = run(make_core(decoder, 20), requests)
    assert answers == expected
    assert max(failed) == 40  # whole steps, and then their halves
    assert min(failed) < 20
    assert "needs more memory than there is; in parts" in caplog.text


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_a_lack_of_memory_is_known_by_its_errors(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


def test_other_errors_of_the_model_are_not_taken_for_a_lack_of_memory(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = limit_rows(decoder, monkeypatch, lambda batch: True, RuntimeError("device-side assert"))
    core = make_core(decoder, 64)
    core.add_requests(make_requests(0)[:2])
    with pytest.raises(RuntimeError, match="device-side assert"):
        core.step()
    assert len(failed) == 1


@pytest.mark.parametrize("position", [0, 20])
def test_a_sequence_that_no_memory_is_enough_for_fails_alone_and_leaves_nothing_behind(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    # Token 7 is only in this prompt: in its first chunk, or behind 20 that can be computed and shared.
    big = EngineRequest(
        request_id="big",
        prompt_token_ids=[5] * position + [7] * (60 - position),
        sampling_params=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    )
    requests = [
        msgspec.structs.replace(
            request, prompt_token_ids=[token + (token == 7) for token in request.prompt_token_ids]
        )
        for request in make_requests(2)[:6]
    ]
    core = make_core(decoder, num_blocks=64)
    core.add_requests(requests)
    expected = collect(core)
    failed = limit_rows(decoder, monkeypatch, lambda batch: bool((batch.input_ids == 7).any()))
    core = make_core(decoder, num_blocks=64)
    assert isinstance(core.runner, TorchRunner)
    core.runner._cache.storage.fill_(torch.nan)
    core.add_requests([*requests[:3], big, *requests[3:]])
    got = collect(core)
    assert got.pop("big") == ([], "error")
    assert got == expected
    assert min(failed) == 1
    # What it had begun may be missing or wrong: nobody finds it.
    monkeypatch.undo()
    core.add_request(msgspec.structs.replace(big, request_id="again"))
    again = collect(core)
    core = make_core(decoder, num_blocks=64)
    core.add_request(msgspec.structs.replace(big, request_id="again"))
    assert again == collect(core)


def collect(core: EngineCore) -> dict[str, tuple[list[int], str | None]]:
    """Run to the end; return the tokens and the finish reason of each request."""
    answers: dict[str, tuple[list[int], str | None]] = {}
    while core.has_work:
        for output in core.step().outputs:
            tokens, _ = answers.setdefault(output.request_id, ([], None))
            if output.token_id >= 0:
                tokens.append(output.token_id)
            answers[output.request_id] = (tokens, output.finish_reason)
        core.check_integrity()
    return answers
