# Every target sets up all that it needs, may be repeated, and is quick the second time.

PYTHON ?= python3
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= smollm2-135m-instruct
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := PIP_CONSTRAINT='$(CURDIR)/constraints.txt' PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install
# A CUDA build of PyTorch brings the Triton that belongs to it, and would not go with a constraint on another.
TRITON := triton==3.6.0
RUNTIME := $(VENV)/.pageglass-runtime
DEV := $(VENV)/.pageglass-dev

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help setup model kernels browser serve test check fast fuzz sanitize format bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV) model kernels ## environment in .venv, dependencies, the default model and the native kernels

serve: kernels ## serve a model and its live view  [MODEL=name-or-path PORT=8000 HOST=127.0.0.1 ARGS=...]
	@if [ '$(MODEL)' = smollm2-135m-instruct ]; then $(PY) -m app models fetch; fi
	@exec $(PY) -m app serve --model '$(MODEL)' --host '$(HOST)' --port '$(PORT)' $(ARGS)

test: check model kernels browser ## the checks and the whole test suite, as CI runs them  [ARGS=...]
	@$(PY) -m pytest $(ARGS)

check: $(DEV) ## lint, format, types, import rules, lengths, vendored files, docs/structure.md
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(VENV)/bin/clang-format --dry-run --Werror engine/kernels/cpu/*.h engine/kernels/cpu/*.cpp
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo
	@$(PY) scripts/check_lengths.py
	@$(PY) scripts/check_vendor.py
	@$(PY) scripts/make_structure.py --check

fast: $(DEV) ## only the tests that need no model, no server and no browser
	@$(PY) -m pytest -q tests/unit tests/property $(ARGS)

fuzz: $(DEV) ## look for hours for a life in which the scheduler is wrong  [ARGS='--hours 8 --seed 100']
	@$(PY) -m tests.support.fuzz $(ARGS)

# Optional: a debug build for each instruction set (minutes, once), then the tests at a third of the speed.
sanitize: $(DEV) ## the tests of the native kernels under AddressSanitizer  [ARGS=...]
	@$(PY) -c 'from engine.kernels.cpu.instruction_sets import runnable; print(*runnable())' | tr ' ' '\n' \
	  | xargs -I ISA $(PY) -m engine.kernels.cpu.build --isa ISA --sanitize --quiet
	@LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PAGEGLASS_SANITIZE=1 \
	  $(PY) -m pytest -q --capture=sys tests/property/test_native_step.py tests/unit/engine/kernels $(ARGS)

format: $(DEV) ## format the code, apply the safe lint fixes, refresh docs/structure.md
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i engine/kernels/cpu/*.h engine/kernels/cpu/*.cpp
	@$(PY) scripts/make_structure.py

bench: $(DEV) model kernels ## measure start-up, throughput, latency, quality, recording and history on this machine
	@$(PY) -m bench.startup
	@$(PY) -m bench.offline --case W1
	@$(PY) -m bench.offline --case W2 --runs 3
	@$(PY) -m bench.offline --case W3 --runs 3
	@$(PY) -m bench.quality --prompts 20
	@$(PY) -m bench.recording
	@$(PY) -m bench.history
	@$(PY) -m bench.serving

model: $(RUNTIME)
	@$(PY) -m app models fetch

# Compiled once for this CPU, in half a minute. Without a compiler the plain torch path serves: no reason to stop.
kernels: $(RUNTIME)
	@$(PY) -m engine.kernels.cpu.build --quiet || true

browser:
	@scripts/ensure_chromium.sh

# PyTorch goes first and by its exact version, so that the packages after it cannot choose another one.
$(RUNTIME): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pageglass needs Python 3.11 or newer; set PYTHON=...")'
	@$(PY) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV) \
	  || { echo "No virtual environment could be made (Debian: apt-get install python3-venv)." >&2; exit 1; }
	@echo "Installing the dependencies into $(VENV) (a few minutes the first time) ..."
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) -qq --editable .
	@touch $@

$(DEV): $(RUNTIME)
	@echo "Installing the development tools into $(VENV) ..."
	@$(PY) -c 'import triton' 2>/dev/null || [ "$$(uname -sm)" != 'Linux x86_64' ] || $(PIP) -qq '$(TRITON)'
	@$(PIP) -qq --editable '.[dev]'
	@touch $@
