"""Starts that must fail: one line on stderr, exit code 2, nothing left running. Real processes."""

import shutil
import socket
from pathlib import Path

import pytest

from app.model_store import DEFAULT_MODEL, resolve_model
from tests.support.server import ServerProcess, run_forked, run_to_exit


@pytest.fixture(scope="module")
def model_path() -> Path:
    return resolve_model(DEFAULT_MODEL)


def assert_refused(
    *arguments: str, words: tuple[str, ...], env: dict[str, str] | None = None, is_forked: bool = True
) -> None:
    run = run_forked if is_forked else run_to_exit
    result = run("serve", "--port", "0", *arguments, env=env)
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("pageglass: ")
    for word in words:
        assert word in lines[0]


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    data_dir = str(tmp_path / "data")
    assert_refused("--data-dir", data_dir, "--model", str(tmp_path / "none.gguf"), words=("none.gguf",))
    assert_refused("--data-dir", data_dir, "--model", "no-such-name", words=("no-such-name", "models list"))
    assert not Path(data_dir).exists()


def test_a_model_that_is_not_fetched_says_how_to_fetch_it(tmp_path: Path) -> None:
    environment = {"PAGEGLASS_MODELS": str(tmp_path)}
    assert_refused(
        "--data-dir", str(tmp_path / "d"), words=("pageglass models fetch",), env=environment, is_forked=False
    )


@pytest.mark.parametrize("num_bytes", [0, 3, 100, 100_000, 50_000_000])
def test_a_truncated_model_is_refused(tmp_path: Path, model_path: Path, num_bytes: int) -> None:
    cut = tmp_path / "cut.gguf"
    with model_path.open("rb") as whole:
        cut.write_bytes(whole.read(num_bytes))
    assert_refused("--data-dir", str(tmp_path / "data"), "--model", str(cut), words=("cut.gguf",))


def test_something_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.gguf").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "empty").mkdir()
    for name in ("noise.gguf", "empty"):
        assert_refused("--data-dir", str(tmp_path / "d"), "--model", str(tmp_path / name), words=(name,))


def test_an_unknown_architecture_is_named(tmp_path: Path, model_path: Path) -> None:
    changed = tmp_path / "changed.gguf"
    shutil.copyfile(model_path, changed)
    with changed.open("r+b") as file:
        head = file.read(2**16)
        place = head.index(b"llama", head.index(b"general.architecture"))
        file.seek(place)
        file.write(b"bloom")
    assert_refused("--data-dir", str(tmp_path / "d"), "--model", str(changed), words=("bloom",))


def test_a_data_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused("--data-dir", str(tmp_path / "file" / "data"), words=("data_dir", "--data-dir"))


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    data_dir = ("--data-dir", str(tmp_path))
    assert_refused(*data_dir, words=("PAGEGLASS_PORT",), env={"PAGEGLASS_PROT": "1"})
    assert_refused(
        *data_dir, "--num-blocks", "4", "--kv-memory", "1GiB", words=("--num-blocks", "--kv-memory")
    )
    assert_refused(*data_dir, "--prot", "1", words=("Did you mean --port",))
    assert_refused(*data_dir, "--block-size", "0", words=("--block-size is 0; allowed: 1 to 256",))


def test_a_cache_too_small_for_one_block_ends_with_a_line(tmp_path: Path) -> None:
    assert_refused("--data-dir", str(tmp_path), "--kv-memory", "1KiB", words=("kv_memory", "block"))


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_refused("--data-dir", str(tmp_path), "--port", port, words=(port, "--port"))


def test_a_second_server_on_the_same_data_folder_is_refused() -> None:
    with ServerProcess(wait_ready=False) as server:
        words = ("data_dir", str(server.process.pid), "--data-dir")
        assert_refused("--data-dir", str(server.data_dir), words=words, is_forked=False)


def test_help_and_version_need_no_model() -> None:
    assert "pageglass serve" in run_to_exit("--help").stdout
    assert run_forked("--version").stdout.startswith("pageglass")
