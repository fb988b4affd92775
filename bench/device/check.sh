#!/bin/sh
# Checks and measures the engine on a machine with a CUDA device, from a checkout and without a network.
# Usage: sh bench/device/check.sh [folder with wheels of packages that are missing there]
# Prints the test results and one JSON object with versions and figures; with OUT set, also writes
# $OUT/throughput.json. Asserts nothing about speed.
set -eu
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
wheels=${1:-}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if [ -n "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

"$python" - <<'EOF'
import importlib
import importlib.util
import sys

names = ("torch", "numpy", "msgspec", "gguf", "tokenizers", "transformers", "pytest")
missing = [name for name in names if not importlib.util.find_spec(name)]
if missing:
    sys.exit(f"missing packages: {', '.join(missing)}; give a folder with their wheels")
if not importlib.import_module("torch").cuda.is_available():
    sys.exit("torch sees no CUDA device here")
EOF

# The project's own test settings name plugins that such a machine need not have.
status=0
"$python" -m pytest -c /dev/null --rootdir . --import-mode=importlib -p no:cacheprovider \
    -o "markers=device: wants an accelerator" -q -ra tests/device || status=$?

"$python" bench/device/throughput.py >"$site/throughput.json"
cat "$site/throughput.json"
if [ -n "${OUT:-}" ]; then
    cp "$site/throughput.json" "$OUT/throughput.json"
fi
exit "$status"
