"""Compiling: once, found again, never half, and one clear line where it cannot be done."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from engine.errors import KernelsUnavailableError
from engine.kernels.cpu import build as build_module
from engine.kernels.cpu.build import KEPT_LIBRARIES, build, find_library, main
from engine.kernels.cpu.instruction_sets import INSTRUCTION_SETS, runnable

ISA = "avx2"

pytestmark = pytest.mark.skipif(
    not runnable() or shutil.which("c++") is None, reason="the kernels cannot be compiled here"
)


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time instead of the real ones."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "api.cpp").write_text('#include "value.h"\nint value() { return kValue; }\n')
    (folder / "exports.map").write_text("{ global: pg_*; local: *; };\n")
    (folder / "value.h").write_text("constexpr int kValue = 1;\n")
    monkeypatch.setattr(build_module, "SOURCE_FOLDER", folder)
    monkeypatch.delenv("CXX", raising=False)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kernels"


def write_compiler(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_library_is_compiled_once_and_found_again(folder: Path) -> None:
    assert find_library(ISA, folder) is None
    path = build(ISA, folder)
    made = path.stat()
    assert build(ISA, folder) == path == find_library(ISA, folder)
    assert path.stat() == made
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_sources_flags_and_compiler_are_in_the_name(folder: Path, sources: Path, tmp_path: Path) -> None:
    paths = {build(ISA, folder), build("avx512", folder)}
    (sources / "value.h").write_text("constexpr int kValue = 2;\n")
    paths.add(build(ISA, folder))
    wrapper = write_compiler(tmp_path / "mine", '[ "$1" = --version ] && echo mine 1.0 || exec c++ "$@"')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", str(wrapper))
        paths.add(build(ISA, folder))
    paths.add(build(ISA, folder, sanitize=True))
    assert len(paths) == 5
    assert {path.name.split("-")[0] for path in paths} == {ISA, "avx512"}


def test_without_a_compiler_one_line_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        KernelsUnavailableError, match=r"C\+\+ compiler.*Debian: apt-get install g\+\+"
    ) as caught:
        build(ISA, folder)
    assert "\n" not in str(caught.value)


def test_without_a_compiler_a_library_made_before_serves(
    folder: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build(ISA, folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build(ISA, folder) == path
    (sources / "value.h").write_text("constexpr int kValue = 3;\n")
    with pytest.raises(KernelsUnavailableError, match="compiler"):
        build(ISA, folder)


def test_broken_sources_are_one_line_with_the_compilers_reason(folder: Path, sources: Path) -> None:
    (sources / "value.h").write_text("constexpr int kValue = nothing;\n")
    with pytest.raises(KernelsUnavailableError, match=r"failed: .*value\.h.*error: .nothing.") as caught:
        build(ISA, folder)
    assert "\n" not in str(caught.value)
    assert caught.value.details.count("\n") > 1
    assert list(folder.iterdir()) == []


def test_a_warning_is_an_error(folder: Path, sources: Path) -> None:
    (sources / "api.cpp").write_text("int value(int unused) { return 1; }\n")
    with pytest.raises(KernelsUnavailableError, match="unused"):
        build(ISA, folder)


@pytest.mark.parametrize("command", ["/nowhere/c++", "no-such-compiler -O1", "'unbalanced"])
def test_a_compiler_that_is_chosen_but_not_there_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("CXX", command)
    first = command.split(maxsplit=1)[0]
    with pytest.raises(KernelsUnavailableError, match=f"CXX names .{first}.*unset") as caught:
        build(ISA, folder)
    assert "apt-get" not in str(caught.value)


@pytest.mark.parametrize("script", ["exit 1", '[ "$1" = --version ] || exit 1', ":"])
def test_a_compiler_that_does_not_work_leaves_a_library_made_before_in_use(
    folder: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    path = build(ISA, folder)
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "broken", script)))
    assert build(ISA, folder) == path
    (sources / "value.h").write_text("constexpr int kValue = 3;\n")
    with pytest.raises(KernelsUnavailableError, match="broken"):
        build(ISA, folder)


def test_a_truncated_library_is_not_found_and_compiled_again(folder: Path) -> None:
    path = build(ISA, folder)
    os.truncate(path, path.stat().st_size - 1)
    assert find_library(ISA, folder) is None
    assert build(ISA, folder) == path == find_library(ISA, folder)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o027, 0o750)])
def test_a_library_may_be_read_by_whom_the_umask_lets(folder: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        path = build(ISA, folder)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_library_that_may_not_be_read_is_not_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(ISA, folder)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may read everything
    assert find_library(ISA, folder) is None


def test_a_compiler_that_fails_without_a_word_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "silent", "exit 3")))
    with pytest.raises(KernelsUnavailableError, match="no reason given"):
        build(ISA, folder)


def test_who_waits_can_give_up_and_the_compiler_ends_with_its_children(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    script = (
        f'[ "$1" = --version ] && exit 0\nsleep 600 & echo $$ $! > {pids}.new && mv {pids}.new {pids}\nwait'
    )
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "slow", script)))

    def give_up(waited_s: float) -> None:
        if pids.exists():
            raise InterruptedError

    with pytest.raises(InterruptedError):
        build(ISA, folder, on_wait=give_up)
    assert list(folder.iterdir()) == []
    deadline = time.monotonic() + 10
    for pid in map(int, pids.read_text().split()):
        while _runs(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # ended, but whoever adopted it has not looked yet


def test_of_several_at_once_one_compiles_and_the_others_wait_for_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    script = f'[ "$1" = --version ] && exit 0\necho run >> {log}\nexec c++ "$@"'
    monkeypatch.setenv("CXX", str(write_compiler(tmp_path / "counted", script)))
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build(ISA, folder))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert [entry.name for entry in folder.iterdir()] == [paths[0].name]
    assert log.read_text() == "run\n"


def test_who_waits_for_another_process_can_give_up_and_compiles_if_that_dies(folder: Path) -> None:
    folder.mkdir(parents=True)
    holding = (
        "import fcntl, os, sys, time\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('held', flush=True)\ntime.sleep(600)"
    )

    def give_up(waited_s: float) -> None:
        raise InterruptedError

    with subprocess.Popen([sys.executable, "-c", holding, str(folder)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with pytest.raises(InterruptedError):
                build(ISA, folder, on_wait=give_up)
            path = build(ISA, folder, on_wait=lambda waited_s: holder.kill())
        finally:
            holder.kill()
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_what_killed_processes_left_goes_after_a_while(folder: Path) -> None:
    left = [folder / ".making-file.so", folder / ".making-folder", folder / ".making-now"]
    left[1].mkdir(parents=True)
    for path in (left[0], left[1] / "library.so", left[2]):
        path.touch()
    for path in left[:2]:
        os.utime(path, (1, 1))
    build(ISA, folder)
    assert [path.exists() for path in left] == [False, False, True]


def test_old_libraries_of_a_kind_go(folder: Path, sources: Path) -> None:
    other = [build("avx512", folder), build(ISA, folder, sanitize=True)]
    made = []
    for value in range(KEPT_LIBRARIES + 2):
        (sources / "value.h").write_text(f"constexpr int kValue = {value + 10};\n")
        made.append(build(ISA, folder))
        os.utime(made[-1], (value + 1, value + 1))
    last = build(ISA, folder)
    assert last == made[-1]
    (sources / "value.h").write_text("constexpr int kValue = 100;\n")
    made.append(build(ISA, folder))
    assert {path for path in made if path.exists()} == set(made[-KEPT_LIBRARIES:])
    assert all(path.exists() for path in other)


def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(KernelsUnavailableError, match="/proc/none"):
        build(ISA, Path("/proc/none"))


def test_the_command_compiles_says_so_and_ends_well(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--isa", ISA, "--folder", str(folder)]) == 0
    first = capsys.readouterr()
    assert "Compiling the kernels for avx2" in first.err
    assert first.out.strip() == str(find_library(ISA, folder))
    assert main(["--isa", ISA, "--folder", str(folder), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_the_command_says_what_serves_instead(
    folder: Path, sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sources / "api.cpp").write_text("broken\n")
    assert main(["--isa", ISA, "--folder", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "broken" in said
    assert said.splitlines()[-1].endswith("The plain torch path will serve instead, several times slower.")


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*INSTRUCTION_SETS, "--sanitize", "libasan.so"))


ZEN4 = frozenset(
    ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"]
)  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (ZEN4, ("avx512", "avx512vnni", "avx2")),
        (ZEN4 - {"avx512_bf16"}, ("avx512vnni", "avx2")),
        (ZEN4 - {"avx512_vnni"}, ("avx2",)),
        (frozenset({"avx2", "fma", "f16c", "avx_vnni"}), ("avx2vnni", "avx2")),
        (frozenset({"avx2", "fma"}), ()),
        (frozenset(), ()),
    ],
)
def test_a_cpu_runs_what_it_has_all_features_of(flags: frozenset[str], expected: tuple[str, ...]) -> None:
    assert runnable(flags) == expected


def test_two_libraries_in_one_process_share_nothing(folder: Path, sources: Path) -> None:
    (sources / "api.cpp").write_text(
        '#include "value.h"\n'
        "inline int* table() { static int values[] = {kValue}; return values; }\n"
        'extern "C" int pg_value() { return table()[0]++; }\n'
    )
    first = ctypes.CDLL(str(build(ISA, folder)))
    (sources / "value.h").write_text("constexpr int kValue = 7;\n")
    second = ctypes.CDLL(str(build(ISA, folder)))
    assert (first.pg_value(), second.pg_value(), first.pg_value()) == (1, 7, 2)
    assert not hasattr(first, "_Z5tablev")
