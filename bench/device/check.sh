#!/bin/sh
# Checks and measures the engine on a machine with a CUDA device, from a checkout and without a network.
#
#   bash bench/device/check.sh              everything, within 8 minutes (give the call 600 s)
#   bash bench/device/check.sh quick        whether it is right, and the attention kernels: within 5 minutes
#   bash bench/device/check.sh throughput   tokens per second against roofline and transformers, idle time
#                                           of the GPU, cost of recording: within 5 minutes
#   bash bench/device/check.sh --tiny --device cpu    try all of it out without a GPU
#
# Packages that the machine lacks are taken from bench/device/wheels, which bench/device/wheels.sh fills where
# there is a network; git ignores that folder, so it has to be carried along. PYTHON names another interpreter.
# Prints one table; writes device.json (also while it runs) and device.log into $OUT, or bench/results/device.
# The exit status is 0 if all was right, whatever the speed; 1 if something was not; 2 if there is no device.
set -u
cd "$(dirname "$0")/../.." || exit 2

python=${PYTHON:-python3}
site=$(mktemp -d) || exit 2
trap 'rm -rf "$site"' EXIT
if ls bench/device/wheels/*.whl >/dev/null 2>&1; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check \
        --target "$site/packages" bench/device/wheels/*.whl || echo "the wheels could not be installed"
fi
export PYTHONPATH="$PWD:$site/packages${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR="$site/triton" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
case " $* " in *" cpu "*) export PAGEGLASS_DEVICE_TESTS=cpu ;; esac

"$python" - <<'PYTHON' || exit 2
import importlib.util
import sys

names = "torch triton numpy msgspec gguf tokenizers transformers pytest platformdirs litestar".split()
missing = [name for name in names if importlib.util.find_spec(name) is None]
if missing:
    print("missing packages:", ", ".join(missing), "(bench/device/wheels.sh fetches their wheels)")
sys.exit("torch" in missing)
PYTHON

"$python" -m bench.device "$@"
