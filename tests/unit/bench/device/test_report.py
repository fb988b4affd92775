from typing import Any

import pytest

from bench.device.report import rows

pytestmark = pytest.mark.unit


def decode_row(batch: int, context: int, percent: float) -> dict[str, Any]:
    return {"batch": batch, "context": context, "us": 1.0, "gb_s": 1.0, "percent_of_copy": percent}


OURS = {
    "num_requests": 256, "output_tokens": 1000, "output_tok_s": 3000.0, "roofline_percent": 61.0,
    "seconds": 9.0, "is_complete": True, "full_decode_ms": 5.25, "full_decode_roofline_percent": 70.4,
    "prefill": {"tokens": 10, "tok_s": 5e5, "roofline_percent": 40.0, "is_complete": False, "seconds": 4.0},
}  # fmt: skip
PEER = {
    "output_tokens": 500, "output_tok_s": 400.0, "best_tok_s": 600.0, "num_seqs": 64,
    "attention": "paged|sdpa", "is_complete": False, "seconds": 20.0,
}  # fmt: skip


def table(**found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {what: (text, bar) for what, text, bar in rows(found)}


def test_nothing_found_gives_no_rows() -> None:
    assert rows({}) == []
    assert rows({"kernels": {"num_cases": 404}, "peer": {}, "breakdown": {"model": "x"}}) == []


def test_the_ratio_is_against_the_best_that_transformers_did() -> None:
    found = table(throughput={"Qwen": OURS}, peer={"Qwen": PEER})
    assert found["Qwen, ours ÷ the best of transformers"] == ("5.0", "≥ 3")
    text, _ = found["Qwen, transformers (paged sdpa)"]
    assert text == "400 tok/s, 600 at best, 64 at once (cut after 20 s)"
    assert found["Qwen decode steps of 256, of roofline"] == ("70 % (5.25 ms a step)", "≥ 65 %")
    assert found["Qwen prefill"][0].endswith("(cut after 4 s)")


def test_a_peer_that_could_not_run_is_not_compared() -> None:
    found = table(throughput={"Qwen": OURS}, peer={"Qwen": {"error": "OutOfMemoryError", "probes": []}})
    assert "Qwen, ours ÷ the best of transformers" not in found
    assert "Qwen, 256 requests" in found


def test_the_decode_bar_is_about_the_worst_of_the_large_sizes() -> None:
    decode = [
        decode_row(64, 2048, 81),
        decode_row(256, 8192, 78.6),
        decode_row(1, 512, 5),
        decode_row(64, 512, 50),
    ]
    prefill = [
        {"cached": 0, "tokens": 8192, "tflops": 400.0, "percent_of_matmul": 51.0},
        {"cached": 14_336, "tokens": 8192, "tflops": 1.0, "percent_of_matmul": 1.0},
    ]
    found = table(bandwidth={"Qwen": {"decode": decode, "prefill": prefill, "left_out": []}})
    ((text, bar),) = [cells for what, cells in found.items() if "decode kernel" in what]
    assert (text, bar) == ("79 % (batch 256, context 8192)", "≥ 75 %")
    assert found["Qwen prefill attention at 8192, of products"] == ("51 % (400 TFLOP/s)", "≥ 50 %")


def test_correctness_is_shown_with_what_was_left_out() -> None:
    kernels = {
        "num_checked": 390, "num_wrong": 1, "num_left_out": 14, "largest_errors": {"float32": 1e-6},
        "tolerances": {"float32": 5e-5},
    }  # fmt: skip
    verdict = {"is_right": False, "first_wrong": {"request": 3}, "compared": 90, "tokens": 100}
    found = table(
        kernels=kernels,
        device_tests={"passed": 5, "failed": 1, "skipped": 2},
        equality={"tie": 1e-4, "Llama": {"ways": {"triton": verdict}}},
    )
    assert found["kernels against float64"] == ("390 cases, 1 wrong, 14 left out", "0 wrong")
    assert found["device tests"] == ("5 passed, 1 failed, 2 skipped", "0 failed")
    text, bar = found["Llama, greedy, CPU against triton"]
    assert (text, bar) == ("different from {'request': 3}, 90 of 100 tokens compared", "equal")


def test_idle_time_is_shown_with_and_without_a_profile() -> None:
    way = {"idle_percent": 2.51, "step_ms": 5.0}
    found = table(
        breakdown={
            "num_seqs": 256,
            "run-ahead": {**way, "profile": {"idle_percent": 3.0}},
            "no run-ahead": {**way, "profile": {"error": "no"}},
            "recording": {"cost_percent": {"ten pages": 1.234}},
        }
    )
    assert found["GPU idle while 256 sequences decode, run-ahead"] == (
        "2.5 % (5.00 ms a step); 3.0 % between kernels, profiled",
        "< 5 %",
    )
    assert found["GPU idle while 256 sequences decode, no run-ahead"] == ("2.5 % (5.00 ms a step)", "")
    assert found["cost of records: ten pages"] == ("1.2 %", "< 2 %")
