import os
import socket
from pathlib import Path

import pytest

from app.commands.preparation import LOCK_FILE, bind_sockets, lock_data_dir, show_url
from engine.errors import ConfigError


def test_the_data_folder_is_made_and_belongs_to_one_server(tmp_path: Path) -> None:
    data_dir = tmp_path / "deep" / "data"
    with lock_data_dir(data_dir):
        message = f"in use by another server .process {os.getpid()}.*--data-dir FOLDER .make serve: ARGS="
        with pytest.raises(ConfigError, match=message), lock_data_dir(data_dir):
            pass
    with lock_data_dir(data_dir):
        pass


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
