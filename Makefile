# The project's commands. `make demo` and `make test` need nothing but Python >= 3.10: each creates the virtual
# environment if it is missing and installs what it needs.

PYTHON ?= python3
VENV ?= .venv
ST_VENV ?= .venv-st
PYTEST_ARGS ?=
# Processes that share the tests.
WORKERS ?= 2
# What is installed for the tests: with PyLate, or (dev-st) with sentence-transformers 6.
TESTED ?= dev
INTERPRETED := tests/kernels/interpreted
NUMERICAL := tests/ops tests/test_losses.py tests/test_soft_losses.py tests/encoding/test_projection.py tests/test_scores.py \
	tests/test_rank.py tests/test_models.py tests/test_indexes.py tests/test_trainer.py tests/test_distributed.py

# A relative VENV is one in this folder.
override VENV := $(abspath $(VENV))
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_OPTIONS)

comma := ,

.DEFAULT_GOAL := help
.PHONY: help demo test test-st test-avx2 lint format docs bench-docs clean

help: ## List the commands.
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 16

demo: $(VENV)/.installed-demo ## Train, search and evaluate a ColBERT model on real text, offline; writes demo-output/.
	HF_HUB_OFFLINE=1 $(BIN)/pylate-flash demo

# Kernels run in Triton's interpreter where there is no GPU; Triton decides on it when it is imported, so that these
# tests have a run of their own, which follows unless PYTEST_ARGS chose others.
test: $(VENV)/.installed-$(TESTED) ## Run the tests (PYTEST_ARGS="tests/cli -x" runs some of them).
	@cache=$$(mktemp -d) && trap 'rm -rf "$$cache"' EXIT && \
	export HF_HOME="$$cache/hf" HF_HUB_OFFLINE=1 IR_DATASETS_HOME="$$cache/ir_datasets" \
		TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1 && \
	status=0 && \
	{ $(PYTEST) $(PYTEST_ARGS) || status=1; } && \
	{ [ -n "$(PYTEST_ARGS)" ] || TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED) || status=1; } && \
	exit $$status

# Tests that import PyLate are skipped there, by a rule of tests/conftest.py, and named at the end.
test-st: ## Run the tests with the newest sentence-transformers, PyTorch and Triton, in an environment of its own.
	$(MAKE) test VENV="$(ST_VENV)" TESTED=dev-st PYTEST_OPTIONS=-rs

test-avx2: $(VENV)/.installed-dev ## Run the tests that compare numbers as a processor without AVX-512 computes them.
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
		$(MAKE) test PYTEST_ARGS="$(NUMERICAL)"

lint: $(VENV)/.installed-dev ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev ## Rewrite the code in the project's style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-dev ## Build the site of guides and reference into docs/_build/html; warnings are errors.
	HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench-docs: $(VENV)/.installed-dev ## Write the tables and the picture again from the results under docs/benchmarks/results/.
	$(BIN)/python docs/benchmarks/make_tables.py
	$(BIN)/python docs/benchmarks/make_picture.py
	$(if $(wildcard docs/benchmarks/results/retrieval-*.json),$(BIN)/python docs/benchmarks/make_search_picture.py)

clean: ## Remove the demo's output and the caches; the virtual environment stays.
	rm -rf demo-output notebooks/demo-output docs/_build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find pylate_flash tests examples docs -name __pycache__ -prune -exec rm -rf {} +

# With a new pip: that of Python 3.10 looks for versions that go together for many minutes.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
		{ echo "Python >= 3.10 is needed, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1); name another: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --upgrade-deps "$(VENV)"

# The stamps say what is installed; a changed pyproject.toml installs again. pip reports each download and how long it
# will take.
define install
	@echo "Installing into $(VENV): PyTorch and what else is needed, some 3 GB. With a fast line that is 2 to 5 minutes."
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -e ".[$(1)]"
endef

# The metrics of ranx are compiled at their first use: here, not in the middle of an evaluation.
define compile_metrics
	@echo "Compiling the metrics of ranx, about half a minute."
	@$(BIN)/python -c "from pylate_flash.beir import prepare_metrics; prepare_metrics()"
endef

$(VENV)/.installed-demo: pyproject.toml | $(BIN)/python
	$(call install,demo$(comma)eval)
	$(compile_metrics)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(call install,dev)
	$(compile_metrics)
	@touch $@

$(VENV)/.installed-dev-st: pyproject.toml | $(BIN)/python
	$(call install,dev-st)
	$(compile_metrics)
	@touch $@
