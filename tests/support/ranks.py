"""What tests of several ranks share: an uneven model, and a look at the processes of a server."""

from pathlib import Path

from tests.support.models import Variant

UNEQUAL = Variant(
    "llama",
    {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True},
)
"""Its three groups of heads cannot be shared out evenly among two."""

_MODULE = b"engine.parallel.worker"
_LISTENS = "0A"  # include/net/tcp_states.h


def find_ranks(parent: int) -> list[int]:
    """Return the process ids of the ranks that a process has started."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _is_rank_of(pid, parent)]


def _is_rank_of(pid: int, parent: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return _MODULE in command and int(fields[1]) == parent


def is_running(pid: int) -> bool:
    """Whether a process is there, and is more than an entry that nobody has asked for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses on which a process listens, as the system writes them (0100007F: 127.0.0.1)."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # closed meanwhile
            continue
        inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and fields[9] in inodes:
                addresses.add(fields[1].partition(":")[0])
    return addresses
