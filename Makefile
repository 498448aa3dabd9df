# Every target makes its own .venv; needs Python 3.11 to 3.13, make and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
RECIPE ?= runs/recipes/quickstart.toml

.PHONY: quickstart test default-tests test-all check format bench help
.DEFAULT_GOAL := help

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade -c constraints.txt pip
	$(INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(INSTALL) -c constraints.txt --group dev
	@touch $@

quickstart: $(VENV)/.ready ## run a whole campaign on a shipped subject (four to eight minutes on two cores)
	$(BIN)/quantforge run $(RECIPE)

test: $(VENV)/.ready-dev ## checks and, beside them, the default tests (at most 10 minutes on two cores)
	$(MAKE) --no-print-directory --jobs 2 --keep-going check default-tests

default-tests: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -n 2 -q

test-all: $(VENV)/.ready-dev ## the slow suites: attacks, crashes, whole campaigns
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -q -m "slow and not gpu and not network"

check: $(VENV)/.ready-dev ## ruff, ruff format, mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev ## rewrite the code in the project's style
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(VENV)/.ready ## time the operations, and what isolation costs an evaluation, as ratios in one run
	$(BIN)/quantforge bench kernels
	$(BIN)/python -m evaluators.bench --programs forge/programs

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
