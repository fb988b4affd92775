"""The largest steps: what they compute, and that whatever computes for real can compute them."""

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.model.decoder import Arithmetic, Decoder
from engine.model.step import ForwardBatch, StepInputs
from engine.runner.memory_profile import (
    StepMemory,
    list_decode_spans,
    list_prompt_spans,
    make_inputs,
    profile_steps,
)
from tests.support.fake_gpu import FakeGpu
from tests.support.models import VARIANTS, load_decoder, make_reference, write_folder
from tests.support.padded_attention import PaddedAttention

CONFIG = EngineConfig(num_blocks=4, block_size=8, max_num_seqs=6, max_num_batched_tokens=40, max_model_len=96)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    torch.set_num_threads(1)
    return load_decoder(
        write_folder(make_reference(VARIANTS["llama tied"]), tmp_path_factory.mktemp("model"))
    )


def test_a_decode_step_has_all_sequences_at_their_last_token() -> None:
    assert list_decode_spans(CONFIG) == [(95, 1)] * 6


@pytest.mark.parametrize(
    ("num_seqs", "num_tokens", "max_model_len", "counts"),
    [
        (6, 40, 96, [6, 6, 7, 7, 7, 7]),
        (4, 4, 96, [1, 1, 1, 1]),
        (3, 1000, 96, [96, 96, 96]),  # more than the sequences can have
        (3, 5, 96, [1, 2, 2]),
    ],
)
def test_a_step_of_prompts_has_all_tokens_that_a_step_may_have(
    num_seqs: int, num_tokens: int, max_model_len: int, counts: list[int]
) -> None:
    config = EngineConfig(
        max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens, max_model_len=max_model_len
    )
    assert list_prompt_spans(config) == [(0, count) for count in counts]


def test_all_sequences_lie_in_the_only_block() -> None:
    inputs = make_inputs([(95, 1), (0, 11)], block_size=8)
    assert inputs.slot_mapping.tolist() == [7, *range(8), 0, 1, 2]
    assert inputs.positions.tolist() == [95, *range(11)]
    assert inputs.block_tables.shape == (2, 12)
    assert not inputs.block_tables.any()
    assert inputs.logits_rows.tolist() == [0, 11]
    assert (inputs.num_decodes, inputs.query_starts.tolist()) == (1, [0, 1, 12])
    arrays = (inputs.slot_mapping, inputs.positions, inputs.block_tables, inputs.logits_rows)
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


class Recording(PaddedAttention):
    """Notes the steps that it plans, and looks for numbers that are none in what it is given."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def plan(self, inputs: StepInputs, batch: ForwardBatch) -> None:
        self.rows.append(len(inputs.input_ids))

    def attend(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        cache: tuple[torch.Tensor, torch.Tensor],
        batch: ForwardBatch,
    ) -> torch.Tensor:
        attended = super().attend(query, new, cache, batch)
        assert attended.isfinite().all()
        return attended


def test_the_steps_are_computed_and_measured_one_by_one(decoder: Decoder) -> None:
    attention = Recording()
    real = Decoder(decoder.config, decoder._weights, 96, Arithmetic(attention))
    gpu = FakeGpu(10**9, 10**9, 0, peaks=[500, 700])
    assert profile_steps(real, gpu, CONFIG) == StepMemory(any_step=700, decode=500)
    assert attention.rows == [6, 6, 40]  # the first one only makes libraries allocate what they keep
    assert gpu.num_measured == 2


def test_a_decode_step_that_needs_more_than_prompts_counts(decoder: Decoder) -> None:
    gpu = FakeGpu(10**9, 10**9, 0, peaks=[900, 700])
    assert profile_steps(decoder, gpu, CONFIG) == StepMemory(any_step=900, decode=900)
