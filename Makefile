# Targets: demo, test, lint, setup, lock, clean. Everything runs in .venv, which the first target makes.
#   PYTHON=python3.12    interpreter to make .venv with (3.11 or newer)
#   PIP_ARGS='...'       more arguments for pip, e.g. --extra-index-url of an index with CPU builds of torch
#   BROWSER=no           leave out the report tests that need headless Chromium
#   PYTEST_ARGS='...'    more arguments for pytest
#   WORKERS=2            test files at a time

SHELL := /bin/bash
PYTHON ?= python3
PIP_ARGS ?=
BROWSER ?= yes
PYTEST_ARGS ?=
WORKERS ?= 2
BIN := .venv/bin
# One thread a process: the engines of both stacks then agree in how they split products, and two workers do not wait
# for one another's threads.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -p no:cacheprovider -n $(WORKERS) --dist loadfile \
  --no-loadscope-reorder
export PIP_ARGS
# Bytecode is kept whatever the caller's environment says: without it each start of vLLM compiles thousands of files.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test lint lock clean
.DEFAULT_GOAL := demo

setup:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: step python: $(PYTHON) is not on PATH" >&2; \
	  echo "hint: install Python 3.11 or newer, or name it: make setup PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) .ci/environment.py setup

demo: setup
	@$(BIN)/rpadiag demo

test: setup
ifeq ($(BROWSER),no)
	$(PYTEST) -m "not browser" $(PYTEST_ARGS)
else
	@$(PYTHON) .ci/environment.py check-browser
	$(PYTEST) $(PYTEST_ARGS)
endif

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lock:
	@$(PYTHON) .ci/environment.py lock

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find rpadiag kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "kept: .venv (remove it to install again) and runs-demo"
