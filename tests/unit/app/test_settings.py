from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from app.cli import main
from app.engine_settings import DEFAULT_KV_MEMORY_BYTES
from app.setting_values import PriorityClass, parse_size
from app.settings import (
    SETTINGS,
    Settings,
    check_environment,
    make_settings,
    render_documentation,
)
from engine.errors import ConfigError

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
        ("dtype", "q5", "--it is 'q5'; allowed: auto, q4, int8, bf16, fp32"),
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
    assert make_settings({}, {}).kv_memory_bytes == DEFAULT_KV_MEMORY_BYTES
    by_count = make_settings({"num_blocks": 4}, {"num_blocks": "--num-blocks"})
    assert by_count.kv_memory_bytes is None
    assert by_count.make_engine_config().num_blocks == 4


@pytest.mark.parametrize(
    ("num_blocks", "kv_memory"),
    [("--num-blocks", "--kv-memory"), ("PAGEGLASS_NUM_BLOCKS", "PAGEGLASS_KV_MEMORY")],
)
def test_two_flags_or_two_variables_that_are_rivals_are_both_named(num_blocks: str, kv_memory: str) -> None:
    with pytest.raises(ConfigError, match=f"{kv_memory} and {num_blocks} are both given"):
        make_settings(
            {"num_blocks": 4, "kv_memory": 2**20}, {"num_blocks": num_blocks, "kv_memory": kv_memory}
        )


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
