# The project's commands. `make demo` and `make test` need nothing but Python >= 3.10: each creates the virtual
# environment if it is missing and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

# A relative VENV is one in this folder.
override VENV := $(abspath $(VENV))
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench-docs clean

help: ## List the commands.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

demo: $(VENV)/.installed-demo ## Train, search and evaluate a ColBERT model on real text, offline; writes demo-output/.
	HF_HUB_OFFLINE=1 $(BIN)/pylate-flash demo

test: $(VENV)/.installed-dev ## Run the tests (PYTEST_ARGS="tests/cli -x" runs some of them).
	@cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && \
	HF_HOME="$$cache/hf" HF_HUB_OFFLINE=1 IR_DATASETS_HOME="$$cache/ir_datasets" TOKENIZERS_PARALLELISM=false \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## Rewrite the code in the project's style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-docs: $(VENV)/.installed-dev ## Write the tables and the picture again from the results under docs/benchmarks/results/.
	$(BIN)/python docs/benchmarks/make_tables.py
	$(BIN)/python docs/benchmarks/make_picture.py

clean: ## Remove the demo's output and the caches; the virtual environment stays.
	rm -rf demo-output dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find pylate_flash tests examples docs -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
		{ echo "Python >= 3.10 is needed, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv "$(VENV)"

# The stamps say what is installed; a changed pyproject.toml installs again.
$(VENV)/.installed-demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[demo,eval]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@
