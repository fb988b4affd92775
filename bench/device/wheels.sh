#!/bin/sh
# Fetches the wheels of what bench/device/check.sh needs beside torch, Triton, numpy, transformers and pytest,
# for Python 3.12 on x86-64, into bench/device/wheels. Versions are those of constraints.txt.
# Needs a network and pip; PYTHON names another interpreter.
set -eu
cd "$(dirname "$0")/../.."

rm -rf bench/device/wheels
"${PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --implementation cp --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
    --constraint constraints.txt --dest bench/device/wheels \
    msgspec gguf platformdirs litestar multipart sniffio
ls -l bench/device/wheels
