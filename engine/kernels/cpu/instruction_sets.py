"""The instruction sets that the kernels are compiled for, and which of them this CPU has. No numpy."""

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
_AVX2_CPU = frozenset({"avx2", "fma", "f16c"})
_AVX512_CPU = _AVX2_CPU | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}

_CPU_FILE = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class InstructionSet:
    """One way to compile the kernels: flags of the compiler, and the CPU features that the result needs."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_flags: frozenset[str]


_ALL = (
    InstructionSet("avx512", (*_AVX512, "-mavx512bf16", *_AVX2), _AVX512_CPU | {"avx512_bf16"}),
    InstructionSet("avx512vnni", (*_AVX512, *_AVX2), _AVX512_CPU),
    InstructionSet("avx2vnni", (*_AVX2, "-mavxvnni"), _AVX2_CPU | {"avx_vnni"}),
    InstructionSet("avx2", _AVX2, _AVX2_CPU),
)
INSTRUCTION_SETS = {instruction_set.name: instruction_set for instruction_set in _ALL}
"""By name, the quickest first."""


def read_cpu_flags() -> frozenset[str]:
    """Return the features of this CPU as Linux names them; none on a machine of another kind."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return frozenset()
    try:
        lines = _CPU_FILE.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def runnable(cpu_flags: frozenset[str] | None = None) -> tuple[str, ...]:
    """Return what a CPU with these flags (None: this CPU) can run: names, the quickest first."""
    present = read_cpu_flags() if cpu_flags is None else cpu_flags
    return tuple(name for name, needed in INSTRUCTION_SETS.items() if needed.cpu_flags <= present)
