from app.load.client import Outcome
from app.load.stats import LoadStats, percentile, progress_text, start_text, summary_lines
from app.load.workload import Job, Workload


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(100, 0, -1)]

    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 99) == 7
    assert percentile([], 50) is None


def test_summary_tells_counts_errors_and_times() -> None:
    stats = LoadStats(num_planned=7, num_skipped=1, num_cut_off=1, elapsed_s=2.0)
    stats.add(Outcome(ttft_s=0.1, gaps_s=[0.01, 0.02], num_output_tokens=3))
    stats.add(Outcome(error="503 busy"))
    stats.add(Outcome(error="503 busy"))
    stats.add(Outcome(error="no connection"))

    assert summary_lines(stats) == [
        "finished              1",
        "failed                3  (2 x 503 busy, 1 x no connection)",
        "skipped               1  (over the context)",
        "stopped               1 cut off, 1 not sent",
        "time to first token   p50 100.0 ms, p99 100.0 ms",
        "between tokens        p50 10.0 ms, p99 20.0 ms",
        "output                3 tokens in 2.0 s, 1.5 tok/s",
    ]


def test_start_line_tells_how_much_will_be_sent() -> None:
    jobs = [Job(0.0, "/v1/completions", 1, lambda _: {}) for _ in range(2)]

    assert (
        start_text(Workload(jobs, num_output_tokens=12, num_prompt_tokens=4321, num_skipped=3), "URL")
        == "2 requests with 4,321 prompt tokens and up to 12 output tokens to URL; "
        "3 skipped, longer than the context"
    )
    assert start_text(Workload(jobs[:1], num_output_tokens=1), "URL") == (
        "1 request with up to 1 output token to URL"
    )


def test_summary_of_nothing_has_no_made_up_numbers() -> None:
    assert summary_lines(LoadStats()) == [
        "finished              0",
        "failed                0",
        "skipped               0",
        "time to first token   -",
        "between tokens        -",
        "output                0 tokens in 0.0 s, 0.0 tok/s",
    ]


def test_progress_names_all_counts() -> None:
    stats = LoadStats(num_planned=9, num_running=2, num_finished=3, num_skipped=1)
    stats.add(Outcome(error="x"))

    assert progress_text(stats, 12.34) == "open 2, finished 3, failed 1, skipped 1 of 9, 12.3 tok/s"


def test_summary_has_a_line_for_each_priority_class() -> None:
    stats = LoadStats(num_planned=4)
    stats.add(Outcome(ttft_s=0.1), "premium")
    stats.add(Outcome(ttft_s=0.3), "premium")
    stats.add(Outcome(error="429 queue_full"), "bulk")
    stats.add(Outcome(ttft_s=0.5), "")

    assert summary_lines(stats)[-3:] == [
        "bulk                  0 finished, first token -",
        "no class              1 finished, first token mean 500.0 ms, p99 500.0 ms",
        "premium               2 finished, first token mean 200.0 ms, p99 300.0 ms",
    ]
