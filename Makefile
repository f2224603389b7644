# Every target sets itself up: the first one makes .venv from pyproject.toml and constraints.txt, and again when they change.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= 2.15.0
COMPAT := .venv-compat-$(TORCH)-$(notdir $(PYTHON))
# Triton 3.6, that of torch 2.11, cannot interpret a loop whose bound is an array of numpy 2.4.
COMPAT_SED := $(if $(filter 2.11.%,$(TORCH)),-e 's/^numpy==.*/numpy==2.3.5/')
DEMO_ARGS ?= --compare 10
TEST_ARGS ?=
# Tests of one file share what they capture, so a file stays with one process, in the order of the files: sorted by how
# many tests they have, as xdist would, files of few long ones come last and one process waits. TEST_WORKERS=0: one.
TEST_WORKERS ?= 2
PYTEST_ARGS = -rs --numprocesses=$(TEST_WORKERS) --dist=loadfile --no-loadscope-reorder

# Before Python starts: with a busy thread beside it, an OpenMP region that spins takes many times longer.
export OMP_WAIT_POLICY := passive

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint docs soak architectures test-compat

help:
	@echo 'make demo                       train a small model under a budget, beside plain PyTorch (DEMO_ARGS=...)'
	@echo 'make test                       the tests, with what is skipped and why (TEST_ARGS="-k adam")'
	@echo 'make test TEST_ARGS=--long      with those that take several seconds each, as CI runs them'
	@echo 'make architectures              train every architecture against plain PyTorch, write docs/architectures.md'
	@echo 'make lint                       ruff, ruff format and strict mypy'
	@echo 'make docs                       the documentation site, in site/, strictly: a warning is an error'
	@echo 'make soak                       the tests with full counts of seeds, kills and loads'
	@echo 'make test-compat TORCH=2.15.0   the tests with another torch or PYTHON=python3.13, in an environment of its own'
	@echo 'make venv                       only the environment, $(VENV)'

venv: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,docs,hf,trl,lightning]"
	touch $@

demo: $(VENV)/.stamp
	$(BIN)/python examples/train_gpt.py $(DEMO_ARGS)

test: $(VENV)/.stamp
	$(BIN)/pytest $(PYTEST_ARGS) $(TEST_ARGS)

soak: $(VENV)/.stamp
	$(BIN)/pytest $(PYTEST_ARGS) --soak --timeout=0 $(TEST_ARGS)

architectures: $(VENV)/.stamp
	$(BIN)/python benchmarks/architectures.py $(ARCHITECTURES_ARGS)

lint: $(VENV)/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	.ci/types $(BIN)/mypy

docs: $(VENV)/.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Other versions of torch warn of other things, so warnings are shown there and are no errors.
test-compat: $(COMPAT)/.stamp
	$(COMPAT)/bin/pytest $(PYTEST_ARGS) -W default --long $(TEST_ARGS)

$(COMPAT)/.stamp: pyproject.toml constraints.txt
	test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	sed -e 's/^torch==.*/torch==$(TORCH)/' $(COMPAT_SED) constraints.txt > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/python -m pip install --quiet -c $(COMPAT)/constraints.txt -e ".[dev,hf]"
	touch $@
