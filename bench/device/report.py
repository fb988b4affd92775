"""The findings of all parts as one table: what was found, beside the bar that it is compared with."""

from collections.abc import Iterator
from typing import Any, TypeAlias

Findings: TypeAlias = dict[str, Any]
Row: TypeAlias = list[str]
"""What, found, bar."""

HEADER = ["what", "found", "bar"]

BIG_BATCH, BIG_CONTEXT = 64, 2048
_PREFILL_TOKENS = 8192


def rows(found: dict[str, Findings]) -> list[Row]:
    """Return the table of the findings by part. What is not there has no row."""
    return [
        *_ceilings(found.get("ceilings", {})),
        *_kernels(found.get("kernels", {})),
        *_tests("device tests", found.get("device_tests", {})),
        *_tests("device tests of loading", found.get("loading_tests", {})),
        *_equality(found.get("equality", {})),
        *_bandwidth(found.get("bandwidth", {})),
        *_throughput(found.get("throughput", {}), found.get("peer", {})),
        *_breakdown(found.get("breakdown", {})),
    ]


def _ceilings(found: Findings) -> Iterator[Row]:
    if "matmul_tflops" in found:
        yield ["copy", f"{found['copy_gb_s']:.0f} GB/s", ""]
        yield ["bf16 product", f"{found['matmul_tflops']:.1f} TFLOP/s", ""]


def _kernels(found: Findings) -> Iterator[Row]:
    if "num_wrong" in found:
        text = f"{found['num_checked']} cases, {found['num_wrong']} wrong"
        if found["num_left_out"]:
            text += f", {found['num_left_out']} left out"
        yield ["kernels against float64", text, "0 wrong"]
        for dtype, error in found["largest_errors"].items():
            yield [f"largest error, {dtype}", f"{error:.1e}", f"{found['tolerances'][dtype]:.0e}"]


def _tests(what: str, found: Findings) -> Iterator[Row]:
    if "failed" in found:
        counts = f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped"
        yield [what, counts, "0 failed"]


def _equality(found: Findings) -> Iterator[Row]:
    for family, figures in found.items():
        if not isinstance(figures, dict):
            continue
        for way, verdict in figures["ways"].items():
            text = "equal" if verdict["is_right"] else f"different from {verdict['first_wrong']}"
            text += f", {verdict['compared']} of {verdict['tokens']} tokens compared"
            yield [f"{family}, greedy, CPU against {way}", text, "equal"]


def _bandwidth(found: Findings) -> Iterator[Row]:
    for shape, figures in found.items():
        big = [
            row for row in figures["decode"] if row["batch"] >= BIG_BATCH and row["context"] >= BIG_CONTEXT
        ]
        if big:
            worst = min(big, key=lambda row: float(row["percent_of_copy"]))
            text = f"{worst['percent_of_copy']:.0f} % (batch {worst['batch']}, context {worst['context']})"
            where = f"least of copy bandwidth from batch {BIG_BATCH}, context {BIG_CONTEXT} on"
            yield [f"{shape} decode kernel, {where}", text, "≥ 75 %"]
        for row in figures["prefill"]:
            if row["tokens"] == _PREFILL_TOKENS and not row["cached"]:
                text = f"{row['percent_of_matmul']:.0f} % ({row['tflops']:.0f} TFLOP/s)"
                yield [f"{shape} prefill attention at {_PREFILL_TOKENS}, of products", text, "≥ 50 %"]


def _throughput(found: Findings, peers: Findings) -> Iterator[Row]:
    for shape in {**found, **peers}:
        ours, peer = found.get(shape, {}), peers.get(shape, {})
        if ours.get("output_tokens"):
            text = f"{ours['output_tok_s']:.0f} tok/s, {ours['roofline_percent']:.0f} % of roofline"
            yield [f"{shape}, {ours['num_requests']} requests", text + _cut(ours), ""]
        if "full_decode_ms" in ours:
            text = f"{ours['full_decode_roofline_percent']:.0f} % ({ours['full_decode_ms']:.2f} ms a step)"
            yield [f"{shape} decode steps of {ours['num_requests']}, of roofline", text, "≥ 65 %"]
        prefill = ours.get("prefill", {})
        if prefill.get("tokens"):
            text = f"{prefill['tok_s']:.0f} tok/s, {prefill['roofline_percent']:.0f} % of roofline"
            yield [f"{shape} prefill", text + _cut(prefill), ""]
        if peer.get("output_tokens"):
            yield from _against_peer(shape, ours, peer)


def _against_peer(shape: str, ours: Findings, peer: Findings) -> Iterator[Row]:
    text = f"{peer['output_tok_s']:.0f} tok/s, {peer['best_tok_s']:.0f} at best, {peer['num_seqs']} at once"
    attention = peer["attention"].replace("|", " ")  # which would end a cell
    yield [f"{shape}, transformers ({attention})", text + _cut(peer), ""]
    if ours.get("output_tokens"):
        # Its best seconds: a run that was cut short has paid for its prompts and not got its tokens.
        ratio = ours["output_tok_s"] / max(peer["output_tok_s"], peer["best_tok_s"])
        yield [f"{shape}, ours ÷ the best of transformers", f"{ratio:.1f}", "≥ 3"]


def _cut(figures: Findings) -> str:
    if figures["is_complete"]:
        return ""
    return f" (cut after {figures['seconds']:.0f} s)"


def _breakdown(found: Findings) -> Iterator[Row]:
    for way in ("run-ahead", "no run-ahead", "no graphs"):
        if way in found:
            figures = found[way]
            text = f"{figures['idle_percent']:.1f} % ({figures['step_ms']:.2f} ms a step)"
            seen = figures.get("profile", {}).get("idle_percent")
            if seen is not None:
                text += f"; {seen:.1f} % between kernels, profiled"
            name = f"GPU idle while {found['num_seqs']} sequences decode, {way}"
            yield [name, text, "< 5 %" if way == "run-ahead" else ""]
    for name, percent in found.get("recording", {}).get("cost_percent", {}).items():
        yield [f"cost of records: {name}", f"{percent:.1f} %", "< 2 %"]
