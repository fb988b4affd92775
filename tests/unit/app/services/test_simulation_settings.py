import pytest

from app.services.simulation_settings import (
    MAX_VARIANTS,
    apply_changes,
    check_variants,
    parse_variants,
    show_changes,
)
from engine.config import EngineConfig
from engine.errors import ConfigError


@pytest.mark.parametrize("name", EngineConfig.__struct_fields__)
def test_every_setting_of_the_engine_can_be_changed(name: str) -> None:
    default = getattr(EngineConfig(), name)
    text = {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)

    assert parse_variants([f"{name}={text}"]) == [{name: default}]


def test_values_of_one_name_are_variants_in_all_combinations() -> None:
    texts = [
        "preemption=oldest-first",
        "num-blocks=8",
        "preemption = newest-first",
        "num_blocks=8",
        "lookahead=OFF",
    ]

    assert parse_variants(texts) == [
        {"preemption": "oldest-first", "num_blocks": 8, "lookahead": False},
        {"preemption": "newest-first", "num_blocks": 8, "lookahead": False},
    ]
    assert parse_variants([]) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("preempton=oldest-first", "'preempton': there is no such setting; the nearest is preemption"),
        ("preemption", "'preemption' is not of the form name=value"),
        ("=3", "'=3' is not of the form name=value"),
        ("num_blocks=many", "--set num_blocks: 'many' is not a whole number"),
        ("lookahead=maybe", "--set lookahead: 'maybe' is neither on nor off"),
        ("watermark=nan", "--set watermark: 'nan' is not a number of 0 or more"),
        ("watermark=-0.5", "'-0.5' is not a number of 0 or more"),
        ("priority_ageing_s=x", "--set priority_ageing_s: 'x' is not a number"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_variants([text])


def test_the_number_of_variants_is_limited() -> None:
    with pytest.raises(ConfigError, match=f"at most {MAX_VARIANTS} are compared"):
        parse_variants([f"num_blocks={number}" for number in range(1, MAX_VARIANTS + 2)])


def test_a_smaller_pool_limits_the_length_of_sequences_as_a_start_does() -> None:
    base = EngineConfig(num_blocks=100, block_size=16, max_model_len=1600)

    assert apply_changes(base, {"num_blocks": 10}).max_model_len == 160
    assert apply_changes(base, {"num_blocks": 1000}).max_model_len == 1600
    with pytest.raises(ConfigError, match="could never run"):
        apply_changes(base, {"num_blocks": 10, "max_model_len": 200})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preemption": "none"}, "preemption is 'none'; allowed: "),
        ({"policy": "none"}, "policy is 'none'; allowed: "),
        ({"preemption_mode": "swap"}, "give --set num_host_blocks=N, too"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_changes(EngineConfig(num_blocks=200), changes)


def test_all_variants_are_checked_at_once() -> None:
    check_variants(EngineConfig(), [{"policy": "priority"}, {"max_num_seqs": 8}])
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        check_variants(EngineConfig(), [{"policy": "priority"}, {"max_num_seqs": 0}])
    with pytest.raises(ConfigError, match="policy is 'none'"):
        check_variants(EngineConfig(policy="none"), [])


def test_changes_are_shown_as_they_are_written() -> None:
    assert show_changes({"lookahead": False, "num_blocks": 8}) == "lookahead=off, num_blocks=8"
