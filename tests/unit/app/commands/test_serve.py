from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

import app.commands.serve
from app.cli import main
from app.model_store import DEFAULT_MODEL
from app.setting_values import PriorityClass
from app.settings import Settings
from engine.errors import ModelError
from engine.model.config import config_from_hf

SMALL_MODEL = config_from_hf(
    {
        "model_type": "llama",
        "num_attention_heads": 2,
        "hidden_size": 64,
        "vocab_size": 100,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
    },
    {},
)
INFO = SimpleNamespace(num_parameters=1, storage="F32")


class Started:
    """Stands in for the server; keeps what it was started with."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.url = ""

    def __call__(self, settings: Settings, sockets: list[Any], url: str) -> None:
        assert sockets
        self.settings, self.url = settings, url


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    server = Started()
    monkeypatch.setattr(app.commands.serve, "run_server", server)
    monkeypatch.setattr(app.commands.serve, "resolve_model", Path)
    monkeypatch.setattr(
        app.commands.serve,
        "open_model",
        lambda path: SimpleNamespace(config=SMALL_MODEL, weights={}, info=INFO),
    )
    monkeypatch.setattr(app.commands.serve, "configure_logging", lambda level: None)
    return server


def serve(tmp_path: Path, *arguments: str, env: dict[str, str] | None = None) -> Result:
    given = ["serve", "--port", "0", "--data-dir", str(tmp_path / "data"), *arguments]
    return CliRunner().invoke(main, given, env=env)


def test_flags_become_settings(started: Started, tmp_path: Path) -> None:
    result = serve(
        tmp_path, "--kv-memory", "64MiB", "--allowed-host", "a", "--allowed-host", "b", "--dtype", "fp32"
    )
    assert result.exit_code == 0, result.output
    assert started.settings == Settings(
        port=0,
        data_dir=tmp_path / "data",
        kv_memory=2**26,
        allowed_host=("a", "b"),
        dtype="fp32",
    )
    assert started.url.startswith("http://127.0.0.1:")


def test_priority_classes_come_from_flags_or_from_one_variable(started: Started, tmp_path: Path) -> None:
    classes = (PriorityClass("vip", -5), PriorityClass("slow", 20))
    by_flags = serve(tmp_path, "--priority-class", "vip=-5", "--priority-class", "slow=20")
    assert by_flags.exit_code == 0, by_flags.output
    assert started.settings is not None
    assert started.settings.priority_class == classes
    serve(tmp_path, env={"PAGEGLASS_PRIORITY_CLASS": "vip=-5 slow=20"})
    assert started.settings.priority_class == classes
    wrong = serve(tmp_path, env={"PAGEGLASS_PRIORITY_CLASS": "vip"})
    assert wrong.exit_code == 2
    assert "PAGEGLASS_PRIORITY_CLASS: 'vip' is not a priority class" in wrong.output


def test_more_swap_memory_than_the_machine_has_is_refused_before_anything_is_loaded(
    started: Started, tmp_path: Path
) -> None:
    result = serve(tmp_path, "--swap-memory", "1024TiB")
    assert result.exit_code == 2
    assert "use a smaller --swap-memory" in result.output
    assert started.settings is None


def test_variables_become_settings_and_flags_win(started: Started, tmp_path: Path) -> None:
    env = {"PAGEGLASS_MAX_NUM_SEQS": "3", "PAGEGLASS_BLOCK_SIZE": "4", "PAGEGLASS_ALLOWED_HOST": "a b"}
    result = serve(tmp_path, "--block-size", "8", env=env)
    assert result.exit_code == 0, result.output
    assert started.settings is not None
    assert (started.settings.max_num_seqs, started.settings.block_size) == (3, 8)
    assert started.settings.allowed_host == ("a", "b")


def test_a_wrong_variable_is_named(started: Started, tmp_path: Path) -> None:
    result = serve(tmp_path, env={"PAGEGLASS_BLOCK_SIZE": "1000"})
    assert result.exit_code == 2
    assert result.output == "pageglass: PAGEGLASS_BLOCK_SIZE is 1000; allowed: 1 to 256.\n"
    assert started.settings is None


@pytest.mark.parametrize(
    ("flag", "variable", "wanted"),
    [
        (("--kv-memory", "64MiB"), {"PAGEGLASS_NUM_BLOCKS": "9"}, (2**26, None)),
        (("--num-blocks", "9"), {"PAGEGLASS_KV_MEMORY": "64MiB"}, (None, 9)),
    ],
)
def test_a_flag_wins_over_the_variable_of_its_rival(
    started: Started,
    tmp_path: Path,
    flag: tuple[str, str],
    variable: dict[str, str],
    wanted: tuple[int | None, int | None],
) -> None:
    result = serve(tmp_path, *flag, env=variable)
    assert result.exit_code == 0, result.output
    assert started.settings is not None
    assert (started.settings.kv_memory, started.settings.num_blocks) == wanted


def test_a_cache_too_small_for_one_block_is_refused_before_the_server_listens(
    started: Started, tmp_path: Path
) -> None:
    result = serve(tmp_path, "--kv-memory", "1")
    assert (result.exit_code, started.settings) == (2, None)
    assert "pageglass: kv_memory is 1, but one block of 16 tokens needs" in result.output
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    "size", [("--kv-memory", "512TiB"), ("--num-blocks", "16777216", "--block-size", "256")]
)
def test_a_cache_larger_than_the_memory_is_refused_before_the_server_listens(
    started: Started, tmp_path: Path, size: tuple[str, ...]
) -> None:
    result = serve(tmp_path, "--device", "cpu", *size)
    assert (result.exit_code, started.settings) == (2, None)
    assert "bytes of memory; use a smaller --kv-memory or --num-blocks" in result.output
    assert not (tmp_path / "data").exists()


def test_a_cache_is_not_held_against_the_memory_where_it_may_lie_on_a_gpu(
    started: Started, tmp_path: Path
) -> None:
    assert serve(tmp_path, "--device", "cuda", "--kv-memory", "512TiB").exit_code == 0
    assert started.settings is not None


@pytest.mark.parametrize(("name", "is_hinted"), [(DEFAULT_MODEL, True), ("mine", False)])
def test_a_damaged_packaged_model_says_how_to_repair_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, is_hinted: bool
) -> None:
    monkeypatch.setenv("PAGEGLASS_MODELS", str(tmp_path))
    (tmp_path / f"{name}.gguf").write_bytes(b"no model")
    result = serve(tmp_path, "--model", name)
    assert result.exit_code == 2
    assert result.output.startswith(f"pageglass: {name}.gguf")
    assert result.output.endswith("; repair it with: pageglass models fetch\n") == is_hinted


def test_a_server_that_others_can_reach_is_warned_about(started: Started, tmp_path: Path) -> None:
    assert "--allowed-host" in serve(tmp_path, "--host", "0.0.0.0").output  # noqa: S104 - the server is a stand-in
    assert "--allowed-host" not in serve(tmp_path).output


def test_an_error_for_users_is_one_line(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise ModelError(f"{path} is\nno model.")

    monkeypatch.setattr(app.commands.serve, "open_model", refuse)
    result = serve(tmp_path, "--model", "x")
    assert (result.exit_code, result.output) == (2, "pageglass: x is no model.\n")
    assert not (tmp_path / "data").exists()
