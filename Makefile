# `make setup` builds everything else's ground: a virtual environment with pinned packages and the project in it, native
# operators included when a C++ compiler is there. Every other target calls it. `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Spinning OpenMP threads make a 1 ms operation take 8 ms as soon as another process wants the core.
export OMP_WAIT_POLICY ?= PASSIVE

NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)

.PHONY: help setup demo test lint format bench docs wheel clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

setup: $(VENV)/.package  ## create .venv with pinned requirements and the package (again only after a change)

$(VENV)/.requirements: $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sagc_fast needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": make setup PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned packages into $(VENV); this takes a few minutes."
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --requirement requirements/dev.txt
	@touch $@

# Kernels are tested without a GPU, so Triton is wanted beside a CPU torch too; a CUDA torch has brought its own.
$(VENV)/.triton: $(VENV)/.requirements
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --requirement requirements/triton.txt || echo "Triton has no wheel for this machine: the tests of its kernels are left out."
	@touch $@

$(VENV)/.package: $(VENV)/.triton $(VENV)/.requirements setup.py pyproject.toml $(NATIVE_SOURCES)
	@echo "Installing the package, native operators included; this takes about a minute."
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup  ## train the addition policy with fixed G=16, with SAGC and with fixed G=4, and compare (a few minutes)
	$(BIN)/sagc-fast demo

test: setup  ## run the tests (TESTS="tests/report -k timeline" narrows them)
	$(BIN)/pytest $(TESTS)

lint: setup  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup  ## apply the formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## microbenchmarks of operators and controller (minutes); `sagc-fast bench` compares with peers
	$(BIN)/pytest bench --benchmark-only --override-ini python_files='bench_*.py'

docs: setup  ## build the documentation into build/docs; any broken link fails
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --requirement requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

wheel: setup  ## build dist/*.whl
	$(BIN)/python -m build --wheel --no-isolation

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info sagc_fast/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
