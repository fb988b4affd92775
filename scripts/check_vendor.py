"""Compare the vendored front-end files with the sums in `static/vendor/vendor.toml`.

Run from anywhere: `python scripts/check_vendor.py`. Prints one line per difference, exit code 1 if any.
"""

import hashlib
import sys
import tomllib
from pathlib import Path

VENDOR = Path(__file__).resolve().parent.parent / "static" / "vendor"
MANIFEST = "vendor.toml"


def check(vendor: Path) -> list[str]:
    """Return one line per listed file that is missing or changed, and per file that is not listed."""
    manifest = tomllib.loads((vendor / MANIFEST).read_text(encoding="utf-8"))
    listed = {
        f"{package['folder']}/{file['path']}": str(file["sha256"])
        for package in manifest["package"]
        for file in package["file"]
    }
    present = {path.relative_to(vendor).as_posix() for path in vendor.rglob("*") if path.is_file()}
    differences = [f"{name}: not listed in {MANIFEST}" for name in sorted(present - {MANIFEST, *listed})]
    for name, expected in sorted(listed.items()):
        if name not in present:
            differences.append(f"{name}: missing")
        elif hashlib.sha256((vendor / name).read_bytes()).hexdigest() != expected:
            differences.append(f"{name}: SHA-256 differs from {MANIFEST}")
    return differences


def main() -> int:
    """Print the differences of this repository."""
    differences = check(VENDOR)
    for difference in differences:
        print(difference)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
