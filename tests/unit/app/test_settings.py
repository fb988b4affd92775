from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from app.cli import main
from app.setting_values import PriorityClass, parse_size
from app.settings import (
    SETTINGS,
    Settings,
    check_environment,
    make_settings,
    render_documentation,
)
from engine.config import AS_SUITS
from engine.errors import ConfigError
from engine.run_plan import RunOptions

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_documentation_is_up_to_date() -> None:
    """Renew it with: python -m app.settings > docs/settings.md."""
    assert (REPOSITORY / "docs" / "settings.md").read_text(encoding="utf-8") == render_documentation()


def test_every_setting_is_a_flag_of_serve_and_says_what_it_does() -> None:
    text = CliRunner().invoke(main, ["serve", "--help"], terminal_width=200).output
    for setting in SETTINGS:
        assert setting.flag in text
        assert setting.variable in text
        assert setting.option.help.endswith(".")


def test_defaults_are_within_their_own_limits() -> None:
    defaults = Settings()
    for setting in SETTINGS:
        value = getattr(defaults, setting.name)
        if setting.option.low is not None and value is not None:
            assert setting.parse(str(value), setting.flag) == value


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 2**30),
        ("512MiB", 2**29),
        ("2GB", 2 * 10**9),
        ("1.5kib", 1536),
        ("64 MiB", 2**26),
        ("100", 100),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_take_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "1XB", "-1GiB", "1e9", "1GiB2", "nan", "\u0668", "9" * 400, "1." + "9" * 400]
)
def test_a_wrong_size_is_an_error_that_shows_how(text: str) -> None:
    with pytest.raises(ConfigError, match="write it like 1GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("port", "65536", "--it is 65536; allowed: 0 to 65535"),
        ("port", "-1", "--it is -1"),
        ("block_size", "0", "--it is 0; allowed: 1 to 256"),
        ("device", "tpu", "--it is 'tpu'; allowed: auto, cpu, cuda"),
        ("policy", "lottery", "--it is 'lottery'; allowed: fcfs, priority"),
        ("dtype", "q5", "--it is 'q5'; allowed: auto, q4, int8, bf16, fp16, fp32"),
        ("attention", "flash", "--it is 'flash'; allowed: auto, triton, varlen, reference"),
        ("gpu_memory_utilization", "much", "--it: 'much' is not a share; write it like 0.9"),
        ("gpu_memory_utilization", "0", "--it is 0; allowed: 0.01 to 1"),
        ("gpu_memory_utilization", "1.5", "--it is 1.5; allowed: 0.01 to 1"),
        ("tensor_parallel_size", "65", "--it is 65; allowed: 1 to 64"),
        ("kernels", "sse", "--it is 'sse'; allowed: auto, avx512, avx512vnni, avx2vnni, avx2, torch"),
        ("max_num_seqs", "many", "--it: 'many' is not a whole number"),
        ("kv_memory", "0", "--it is 0; allowed: 1 byte to 1 EiB"),
        ("kv_memory", "9999999999999999999TiB", "allowed: 1 byte to"),
        ("port", "\u0668", "is not a whole number"),
        ("port", "8_0", "is not a whole number"),
        ("port", "9" * 5000, "^--it: '9{40}\u2026' is not a whole number"),
        ("shutdown_timeout", "\u0668", "is not a number of seconds"),
        ("shutdown_timeout", "1e3", "is not a number of seconds"),
        ("shutdown_timeout", "nan", "--it: 'nan' is not a number of seconds"),
        (
            "preemption",
            "random",
            "--it is 'random'; allowed: newest-first, least-computed-first, oldest-first",
        ),
        ("preemption_mode", "drop", "--it is 'drop'; allowed: auto, recompute, swap"),
        ("preemption_quantum", "0", "--it is 0; allowed: 1 to"),
        ("priority_ageing", "86401", "--it is 86401; allowed: 0 to 86400"),
        ("swap_memory", "-1", "--it: '-1' is not a size"),
        ("offload", "yes", "--it is 'yes'; allowed: on, off"),
        ("max_concurrency_per_key", "-1", "--it is -1; allowed: 0 to"),
        ("priority_class", "premium", "--it: 'premium' is not a priority class; write it like premium=-10"),
        ("priority_class", "premium=1001", "a number from -1000 to 1000"),
        ("priority_class", "5=5", "beginning with a letter"),
        ("priority_class", "a=\u0668", "is not a priority class"),
    ],
)
def test_an_error_names_the_source_and_what_is_allowed(name: str, text: str, message: str) -> None:
    setting = next(setting for setting in SETTINGS if setting.name == name)
    with pytest.raises(ConfigError, match=message):
        setting.parse(text, "--it")


def test_no_text_may_be_empty() -> None:
    for setting in SETTINGS:
        for text in ("", " "):
            with pytest.raises(ConfigError, match="--it"):
                setting.parse(text, "--it")


def test_an_unknown_variable_is_an_error_that_names_the_nearest() -> None:
    check_environment(["PAGEGLASS_PORT", "PAGEGLASS_MODELS", "PAGEGLASS_NO_BROWSER", "PATH"])
    with pytest.raises(ConfigError, match="PAGEGLASS_PROT is not known; did you mean PAGEGLASS_PORT"):
        check_environment(["PATH", "PAGEGLASS_PROT"])
    with pytest.raises(ConfigError, match="PAGEGLASS_FROBNICATE is not known; unset it"):
        check_environment(["PAGEGLASS_FROBNICATE"])


def test_an_unknown_flag_suggests_the_nearest() -> None:
    result = CliRunner().invoke(main, ["serve", "--prot", "1"])
    assert result.exit_code == 2
    assert "--port" in result.output


def test_the_cache_is_sized_one_way_only() -> None:
    unsized = make_settings({}, {})
    assert (unsized.kv_memory, unsized.make_engine_config().num_blocks) == (None, AS_SUITS)
    by_count = make_settings({"num_blocks": 4}, {"num_blocks": "--num-blocks"})
    assert by_count.make_engine_config().num_blocks == 4
    sources = {"num_blocks": "--num-blocks", "gpu_memory_utilization": "PAGEGLASS_GPU_MEMORY_UTILIZATION"}
    by_flag = make_settings({"num_blocks": 4, "gpu_memory_utilization": 0.5}, sources)
    assert by_flag.gpu_memory_utilization == Settings().gpu_memory_utilization


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("--kv-memory", "--num-blocks"),
        ("PAGEGLASS_KV_MEMORY", "PAGEGLASS_NUM_BLOCKS"),
        ("--gpu-memory-utilization", "--kv-memory"),
        ("--gpu-memory-utilization", "--num-blocks"),
    ],
)
def test_two_flags_or_two_variables_that_are_rivals_are_both_named(first: str, second: str) -> None:
    values = {"num_blocks": 4, "kv_memory": 2**20, "gpu_memory_utilization": 0.5}
    sources = {
        source.lower().removeprefix("pageglass_").removeprefix("--").replace("-", "_"): source
        for source in (first, second)
    }
    with pytest.raises(ConfigError, match=f"{first} and {second} are both given; both size the KV cache"):
        make_settings({name: values[name] for name in sources}, sources)


def test_limits_that_nobody_asks_for_are_left_to_the_device() -> None:
    config = Settings().make_engine_config()
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (AS_SUITS, AS_SUITS)
    config = Settings(max_num_seqs=3, max_num_batched_tokens=9).make_engine_config()
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (3, 9)
    shown = {setting.name: setting.shown_default for setting in SETTINGS}
    assert shown["max_num_seqs"] == "64; 256 on a GPU"
    assert shown["max_num_batched_tokens"] == "256; 8192 on a GPU"


def test_how_the_model_is_run_is_what_is_set() -> None:
    options = Settings(
        attention="varlen",
        tensor_parallel_size=2,
        gpu_memory_utilization=0.5,
        async_scheduling="off",
        cuda_graphs="off",
    ).run_options
    assert (options.attention, options.tensor_parallel_size) == ("varlen", 2)
    assert options.gpu_memory_utilization == 0.5
    assert (options.async_scheduling, options.cuda_graphs) == (False, False)
    assert Settings().run_options == RunOptions()


def test_several_processes_do_not_go_with_memory_to_swap_to() -> None:
    sources = {"tensor_parallel_size": "--tensor-parallel-size", "swap_memory": "PAGEGLASS_SWAP_MEMORY"}
    message = "--tensor-parallel-size and PAGEGLASS_SWAP_MEMORY are both given"
    with pytest.raises(ConfigError, match=message):
        make_settings({"tensor_parallel_size": 2, "swap_memory": 2**20}, sources)
    assert make_settings({"tensor_parallel_size": 1, "swap_memory": 2**20}, sources).swap_memory == 2**20


def test_classes_replace_the_default_ones_from_flags_and_from_the_environment() -> None:
    assert dict(Settings().priority_class) == {"premium": -10, "standard": 0, "bulk": 10}
    [setting] = [setting for setting in SETTINGS if setting.name == "priority_class"]
    assert setting.is_list
    chosen = tuple(setting.parse(text, "--it") for text in ("vip=-1000", "any-one_2=+7"))
    settings = make_settings({"priority_class": chosen}, {"priority_class": "--priority-class"})
    assert settings.priority_class == (PriorityClass("vip", -1000), PriorityClass("any-one_2", 7))
    with pytest.raises(ConfigError, match="PAGEGLASS_PRIORITY_CLASS: 'vip' is there more than once"):
        make_settings(
            {"priority_class": (PriorityClass("vip", 1), PriorityClass("vip", 2))},
            {"priority_class": "PAGEGLASS_PRIORITY_CLASS"},
        )


def test_swapping_needs_memory_to_swap_to() -> None:
    sources = {"preemption_mode": "--preemption-mode", "swap_memory": "--swap-memory"}
    with pytest.raises(
        ConfigError, match="--preemption-mode is swap, which needs memory; give --swap-memory"
    ):
        make_settings({"preemption_mode": "swap"}, sources)
    assert make_settings({"preemption_mode": "swap", "swap_memory": 2**20}, sources).swap_memory == 2**20


def test_the_engine_gets_what_is_set() -> None:
    settings = Settings(
        policy="priority",
        priority_ageing=2.5,
        preemption="oldest-first",
        preemption_mode="recompute",
        preemption_quantum=7,
        offload="off",
        lookahead="off",
    )
    config = settings.make_engine_config()
    assert (config.policy, config.priority_ageing_s, config.preemption_quantum) == ("priority", 2.5, 7)
    assert (config.preemption, config.preemption_mode) == ("oldest-first", "recompute")
    assert (config.offload, config.lookahead) == (False, False)
    assert (Settings().make_engine_config().offload, Settings().make_engine_config().lookahead) == (
        True,
        True,
    )


def test_the_model_is_named_after_its_path_unless_told_otherwise() -> None:
    assert Settings(model="/models/qwen3-0.6b/").model_name == "qwen3-0.6b"
    assert Settings(model="a/b.gguf").model_name == "b"
    assert Settings(model="a/b.gguf", served_model_name="mine").model_name == "mine"


def test_settings_cannot_be_changed() -> None:
    settings = Settings()
    with pytest.raises(AttributeError):
        settings.port = 1  # type: ignore[misc]
    assert msgspec.structs.replace(settings, port=1).port == 1
