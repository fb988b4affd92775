import os
import socket
import threading
import time
from pathlib import Path

import pytest

from app.commands import preparation
from app.commands.preparation import (
    LOCK_FILE,
    bind_sockets,
    is_in_use,
    lock_data_dir,
    share_data_dir,
    show_url,
)
from engine.errors import ConfigError


def test_the_data_folder_is_made_and_belongs_to_one_server(tmp_path: Path) -> None:
    data_dir = tmp_path / "deep" / "data"
    with lock_data_dir(data_dir):
        message = f"in use by another server .process {os.getpid()}.*--data-dir FOLDER .make serve: ARGS="
        with pytest.raises(ConfigError, match=message), lock_data_dir(data_dir):
            pass
    with lock_data_dir(data_dir):
        pass


def test_commands_share_the_data_folder_and_are_no_servers(tmp_path: Path) -> None:
    with share_data_dir(tmp_path), share_data_dir(tmp_path):
        assert not is_in_use(tmp_path)
    with lock_data_dir(tmp_path):
        assert is_in_use(tmp_path)
        message = f"in use by another server .process {os.getpid()}"
        with pytest.raises(ConfigError, match=message), share_data_dir(tmp_path):
            pass
    assert not is_in_use(tmp_path)


def test_a_server_waits_for_a_command_and_says_if_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "LOCK_POLL_S", 0.001)
    command = share_data_dir(tmp_path)
    command.__enter__()
    polls: list[float] = []

    def sleep(duration_s: float) -> None:
        polls.append(duration_s)
        if len(polls) == 3:
            command.__exit__(None, None, None)

    monkeypatch.setattr(time, "sleep", sleep)
    with lock_data_dir(tmp_path):
        assert len(polls) == 3

    monkeypatch.setattr(preparation, "LOCK_TIMEOUT_S", 0.0)
    with (
        share_data_dir(tmp_path),
        pytest.raises(ConfigError, match=r"a command has been busy with data_dir .*--data-dir"),
        lock_data_dir(tmp_path),
    ):
        pass


def test_servers_that_start_at_once_are_not_in_each_others_way_for_ever(tmp_path: Path) -> None:
    outcomes: list[str] = []
    is_done = threading.Event()

    def start() -> None:
        try:
            with lock_data_dir(tmp_path):
                outcomes.append("serves")
                is_done.wait(10)
        except ConfigError as error:
            outcomes.append(str(error))
            is_done.set()

    command = share_data_dir(tmp_path)
    command.__enter__()
    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    command.__exit__(None, None, None)
    for thread in threads:
        thread.join()
    assert max(outcomes) == "serves"
    assert "in use by another server" in min(outcomes)


def test_a_lock_file_left_by_a_crash_does_not_lock(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("99999999\n", encoding="ascii")
    with lock_data_dir(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text(encoding="ascii") == f"{os.getpid()}\n"


def test_a_data_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"data_dir .*file/data cannot be created \(Not a directory\)"),
        lock_data_dir(tmp_path / "file" / "data"),
    ):
        pass


def test_a_file_system_that_takes_no_folders_is_said() -> None:
    message = r"data_dir /proc/a/b cannot be created \(/proc takes no new folders\)"
    with pytest.raises(ConfigError, match=message), lock_data_dir(Path("/proc/a/b")):
        pass


def test_port_zero_takes_one_free_port_for_all_addresses() -> None:
    with bind_sockets("localhost", 0) as sockets:
        ports = {bound.getsockname()[1] for bound in sockets}
        assert len(ports) == 1
        assert 0 not in ports
    assert all(bound.fileno() == -1 for bound in sockets)


def test_connections_will_not_wait_for_acknowledgements() -> None:
    with bind_sockets("127.0.0.1", 0) as sockets:
        assert {bound.proto for bound in sockets} == {socket.IPPROTO_TCP}


def test_a_port_in_use_is_named() -> None:
    with bind_sockets("127.0.0.1", 0) as sockets:
        port = sockets[0].getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use; .*--port"),
            bind_sockets("127.0.0.1", port),
        ):
            pass


def test_a_port_can_be_taken_again_at_once() -> None:
    with bind_sockets("127.0.0.1", 0) as sockets:
        port = sockets[0].getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            sockets[0].setblocking(True)
            sockets[0].accept()[0].close()
    with bind_sockets("127.0.0.1", port):
        pass


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1"])
def test_an_address_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(ConfigError, match=host), bind_sockets(host, 0):
        pass


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),  # noqa: S104 - only shown
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_the_shown_address_can_be_clicked(host: str, url: str) -> None:
    assert show_url(host, 80) == url
