# Every target that needs Python makes the environment first, so each alone is enough.
#
#   make train ARGS="--set=train.steps=20 --workdir=runs/short"
#   make train CONFIG=configs/debug.py
#   make setup PYTHON=/path/to/python3.12      make setup EXTRAS=train,dev,gpu

STACK ?=
VENV ?= $(if $(filter a,$(STACK)),.venv-a,.venv)
PYTHON ?=
EXTRAS ?=
CONFIG ?= configs/tiny.py
ARGS ?=
# Test processes. Most of the work is compiling on one thread, so one process a core; tests that
# share compiled functions stay in one process (tests/conftest.py).
JOBS ?= 2

# The checks that show a stack to work: import rules, kernels against their references, the golden
# models, and training steps.
SMOKE ?= tests/test_imports.py tests/pallas_kernels/kda tests/pallas_kernels/attention \
	tests/k3jax/models/test_golden.py tests/k3jax/train/test_step.py

PY = $(VENV)/bin/python
PYTEST = $(PY) -m pytest -n $(JOBS) --dist loadfile

.PHONY: help setup setup-a train test test-slow test-smoke lint format types ci clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

setup: ## make .venv from the newest supported Python that runs, with pinned packages
	@STACK='$(STACK)' VENV='$(VENV)' PYTHON='$(PYTHON)' EXTRAS='$(EXTRAS)' sh .ci/setup.sh

setup-a: ## make .venv-a from Python 3.11, for the smoke tests
	@$(MAKE) --no-print-directory setup STACK=a

train: setup ## train the recipe CONFIG; flags go in ARGS="..."
	$(PY) experiments/train.py --config=$(CONFIG) $(ARGS)

test: lint ## lint and the default tests
	$(PYTEST) $(ARGS)

test-slow: setup ## the tests marked slow
	$(PYTEST) -m 'slow and not gpu' $(ARGS)

test-smoke: setup ## a short set of tests; with STACK=a on Python 3.11
	$(PYTEST) $(SMOKE) $(ARGS)

lint: setup ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: setup ## let ruff format and repair
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: setup ## pyrefly
	$(PY) -m pyrefly check --python-interpreter-path $(PY)

ci: ## what CI runs: lint, types, tests, and the smoke tests on Python 3.11
	bash .ci/run

clean: ## remove environments and caches; runs/ stays
	rm -rf .venv .venv-a .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
