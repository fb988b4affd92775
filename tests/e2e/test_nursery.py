"""A server that is forked is what one that is started is: for the tests that use the former."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.nursery import ForkedProcess
from tests.support.server import ServerProcess, run_forked, run_to_exit


@pytest.mark.parametrize("arguments", [["--version"], ["serve", "--prot", "1"]])
def test_a_fork_prints_and_returns_what_the_program_does(arguments: list[str]) -> None:
    forked, started = run_forked(*arguments), run_to_exit(*arguments)

    assert (forked.returncode, forked.stdout, forked.stderr) == (
        started.returncode,
        started.stdout,
        started.stderr,
    )


def test_a_fork_has_the_environment_that_it_is_given() -> None:
    result = run_forked("serve", env={"PAGEGLASS_PROT": "1"})

    assert result.returncode == 2
    assert "PAGEGLASS_PROT" in result.stderr
    assert run_forked("--version").returncode == 0, "the one before left nothing behind"


def test_a_fork_is_a_process_of_its_own_that_ends_as_it_was_ended(tmp_path: Path) -> None:
    data_dirs = [tmp_path / "a", tmp_path / "b"]
    servers = [ServerProcess(data_dir=folder, is_forked=True, wait_ready=False) for folder in data_dirs]
    with servers[0], servers[1]:
        killed, stopped = (server.process for server in servers)
        assert len({killed.pid, stopped.pid, os.getpid()}) == 3
        killed.kill()
        assert killed.wait() == -signal.SIGKILL
        assert stopped.poll() is None
        stopped.send_signal(signal.SIGTERM)
        assert stopped.wait(30) == 0
        assert isinstance(stopped, ForkedProcess)
