"""What the device can do at most: bytes of a copy per second, bf16 products per second.

Copies count bytes read and written. Everything else in this folder is compared with these two figures, which
are measured in the same run.
"""

import importlib.metadata
import platform
import subprocess
import sys
from dataclasses import dataclass

import torch

from bench.device.part import CEILINGS_FILE, NO_DEVICE_STATUS, Findings, Options, parse, read_json
from bench.device.timing import measure_s, wait_for

_COPY_NUMBERS = 1 << 30  # of four bytes
_MATMUL_SIZE = 8192
_PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec")


@dataclass(frozen=True)
class Ceilings:
    """GB/s (10^9, read and written) of a copy, TFLOP/s of a bf16 product."""

    copy_gb_s: float
    matmul_tflops: float

    def floor_s(self, num_bytes: float, operations: float) -> float:
        """Return the seconds that this takes at least where moving and computing overlap fully."""
        return max(num_bytes / (self.copy_gb_s * 1e9), operations / (self.matmul_tflops * 1e12))


def measure(options: Options) -> Ceilings:
    """Measure both, on random numbers: zeros are quicker."""
    numbers = 1 << 22 if options.is_tiny else _COPY_NUMBERS
    copy_s = _copy_s(numbers, options.device)
    side = 256 if options.is_tiny else _MATMUL_SIZE
    left, right = (torch.randn(side, side, device=options.device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    matmul_s = measure_s(lambda: torch.mm(left, right, out=product), options.device)
    wait_for(options.device)
    return Ceilings(2 * 4 * numbers / copy_s / 1e9, 2 * side**3 / matmul_s / 1e12)


def _copy_s(numbers: int, device: str) -> float:
    source = torch.randint(1 << 30, (numbers,), dtype=torch.int32, device=device)  # (numbers) int32
    target = torch.empty_like(source)  # (numbers) int32
    return measure_s(lambda: target.copy_(source), device)


def ceilings_of(options: Options) -> Ceilings:
    """Return what the part of this name has found, or measure it again."""
    found = read_json(options.json.with_name(CEILINGS_FILE))
    if "copy_gb_s" in found and "matmul_tflops" in found:
        return Ceilings(found["copy_gb_s"], found["matmul_tflops"])
    return measure(options)


def describe_machine(device: str) -> dict[str, object]:
    """Return versions, and what the device is."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    machine: dict[str, object] = {"python": platform.python_version(), "packages": versions, "device": device}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(0)
        machine |= {
            "gpu": properties.name,
            "gpu_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    return machine


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]  # only asks
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"
    return done.stdout.strip()


def main() -> int:
    """Measure and write; say so if there is no device."""
    options = parse(__doc__)
    if options.is_cuda and not torch.cuda.is_available():
        return NO_DEVICE_STATUS
    findings = Findings(options.json)
    findings.put("machine", describe_machine(options.device))
    ceilings = measure(options)
    findings.put("copy_gb_s", ceilings.copy_gb_s)
    findings.put("matmul_tflops", ceilings.matmul_tflops)
    print(f"copy {ceilings.copy_gb_s:.0f} GB/s, bf16 product {ceilings.matmul_tflops:.1f} TFLOP/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
