"""What a server needs before it starts: sizes that fit, its data folder for itself, and its port."""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from app.folders import make_folder
from app.settings import Settings
from engine.config import resolve
from engine.errors import ConfigError
from engine.machine import Gpus, may_have_gpu, total_memory_bytes
from engine.model.check import ModelFiles
from engine.run_plan import choose_plan, refuse_host_tier

LOCK_FILE = "server.lock"
LOCK_TIMEOUT_S = 10.0
"""How long a server that starts waits for commands."""

LOCK_POLL_S = 0.05

_BYTES_PER_NUMBER = {"int8": 1, "bf16": 2, "fp16": 2, "fp32": 4}
"""Of the KV cache, scales left out."""

_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
"""An address family that this machine does not have; localhost often names one."""


def check_model(settings: Settings, files: ModelFiles) -> None:
    """Raise `ConfigError` for settings that cannot work with the model.

    What is only known while loading is checked again then: whether there is a GPU, whether the kernels can
    be compiled, and how large a block is to the byte.
    """
    options = settings.run_options
    refuse_host_tier(options, settings.swap_memory)
    may_use_gpu = settings.device == "cuda" or (settings.device == "auto" and may_have_gpu())
    if may_use_gpu:
        device = "cuda"
        kv_dtype = settings.kv_dtype if settings.kv_dtype in _BYTES_PER_NUMBER else "bf16"
    else:
        info = choose_plan(options, files, find_gpus=Gpus).info
        device, kv_dtype = info.device, info.kv_dtype
    block_bytes = files.config.kv_bytes_per_token(_BYTES_PER_NUMBER[kv_dtype]) * settings.block_size
    config = resolve(
        settings.make_engine_config(),
        device=device,
        model_max_len=files.config.max_position,
        kv_bytes_per_block=block_bytes,
        kv_memory_bytes=settings.kv_memory,
        swap_memory_bytes=settings.swap_memory,
    )
    pool_bytes = 0 if may_use_gpu else config.num_blocks * block_bytes
    _check_memory(pool_bytes, config.num_host_blocks * block_bytes)


def _check_memory(pool_bytes: int, host_bytes: int) -> None:
    available = total_memory_bytes()
    if pool_bytes > available:
        raise ConfigError(
            f"a KV pool of {pool_bytes:,} bytes does not fit into {available:,} bytes of memory; "
            "use a smaller --kv-memory or --num-blocks."
        )
    if pool_bytes + host_bytes > available:
        raise ConfigError(
            f"{host_bytes:,} bytes for swapped blocks do not fit into {available:,} bytes of memory beside a "
            f"KV pool of {pool_bytes:,}; use a smaller --swap-memory."
        )


@contextmanager
def lock_data_dir(data_dir: Path) -> Iterator[None]:
    """Hold the data folder for this server; the system lets go of it even after a crash.

    Waits for commands that are busy with the folder. Raises `ConfigError` if another server holds it.
    """
    with _open_lock(data_dir) as lock:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(lock, fcntl.LOCK_EX):
            _refuse_served(lock, data_dir)
            fcntl.flock(lock, fcntl.LOCK_UN)  # or two servers that start would be in each other's way
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"a command has been busy with data_dir {data_dir} for a long time, such as "
                    "`pageglass db upgrade`; end it, or choose another folder with --data-dir."
                )
            time.sleep(LOCK_POLL_S)
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


@contextmanager
def share_data_dir(data_dir: Path) -> Iterator[None]:
    """Keep servers from starting in the data folder; several commands may do so at once.

    Raises `ConfigError` if a server holds it.
    """
    with _open_lock(data_dir) as lock:
        _refuse_served(lock, data_dir)
        yield


def is_in_use(data_dir: Path) -> bool:
    """Whether a server runs that keeps its data in this folder."""
    try:
        lock = (data_dir / LOCK_FILE).open(encoding="ascii")
    except OSError:
        return False
    with lock:
        return not _try_lock(lock, fcntl.LOCK_SH)


def _open_lock(data_dir: Path) -> TextIO:
    try:
        make_folder(data_dir)
    except OSError as error:
        raise ConfigError(
            f"data_dir {data_dir} cannot be created ({error.strerror}); "
            "choose another folder with --data-dir."
        ) from error
    try:
        return (data_dir / LOCK_FILE).open("a+", encoding="ascii")
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"data_dir {data_dir} cannot be written ({reason}); choose another folder with --data-dir."
        ) from error


def _try_lock(lock: TextIO, kind: int) -> bool:
    """Lock a file, exclusively as servers do, or shared as commands do; False if others are in the way."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _refuse_served(lock: TextIO, data_dir: Path) -> None:
    """Take the lock shared, which only a server is in the way of; raises `ConfigError` then."""
    if not _try_lock(lock, fcntl.LOCK_SH):
        lock.seek(0)
        owner = lock.read(20).strip() or "unknown"
        raise ConfigError(
            f"data_dir {data_dir} is in use by another server (process {owner}); stop it, or choose "
            "another folder with --data-dir FOLDER (make serve: ARGS='--data-dir FOLDER')."
        )


@contextmanager
def bind_sockets(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Bind every address that `host` means; port 0 takes one free port for all of them."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host {host!r} is not an address of this machine ({error.strerror}).") from error
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        refused: OSError | None = None
        for family, _, _, _, (name, _, *rest) in dict.fromkeys(found):
            chosen_port = sockets[0].getsockname()[1] if sockets else port
            address = (name, chosen_port, *rest)
            try:
                sockets.append(stack.enter_context(_bind(family, address)))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise _explain(host, port, error) from error
                refused = error
        if not sockets:
            raise _explain(host, port, refused or OSError("no address found"))
        yield sockets


def show_url(host: str, port: int) -> str:
    """Return the address under which this machine's browser finds the server."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - not bound
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    # With the protocol named, asyncio turns Nagle's algorithm off on the connections; without, every answer
    # would wait 40 ms for an acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        # Listening now, not when the application is up: two servers may both bind with SO_REUSEADDR.
        bound.listen(2048)
        bound.setblocking(False)  # noqa: FBT003 - the socket API
    except OSError:
        bound.close()
        raise
    return bound


def _explain(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use; stop what uses it, or choose another with --port NUMBER "
            "(make serve: PORT=NUMBER)."
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} may not be used by this user; choose one above 1023 with --port.")
    return ConfigError(f"cannot listen on {host}, port {port}: {error.strerror or error}.")
