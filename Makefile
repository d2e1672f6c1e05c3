# Every target sets up .venv by itself, from nothing but Python 3.10 or newer, and starts at once the next time.
PYTHON ?= python3
# More for pip. On Linux the CPU build of torch is much smaller than the usual one:
#   make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=

BIN := .venv/bin
export RAY_USAGE_STATS_ENABLED := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo bench test test-all gpu-test lint format

help:
	@echo 'make demo      train a small model, 2 stages x 2 members, on this machine (a few minutes)'
	@echo 'make bench     ours against what else trains such a model, in interleaved rounds (BENCH_ARGS=--quick: minutes)'
	@echo 'make test      format, lint and types, and all tests but the long ones'
	@echo 'make test-all  the long tests too'
	@echo 'make gpu-test  the tests that need a GPU, several members on one'
	@echo 'make lint      format, lint and types alone'
	@echo 'make format    put the code in form'

demo: .venv/run.stamp
	@run=demo-$$(date +%Y%m%d-%H%M%S) && $(BIN)/zeropp train examples/demo.toml --name $$run && \
	printf '\nA sample of what it writes (zeropp sample %s):\n' $$run && $(BIN)/zeropp sample $$run --prompt 'The ' --tokens 300

bench: .venv/bench.stamp
	@$(BIN)/python -m bench $(BENCH_ARGS)

# What needs no cluster runs in two processes; clusters come one after the other, for some of their tests watch the clock.
test: lint
	@$(BIN)/pytest -n 2 -m "not full and not ray"
	@$(BIN)/pytest -m "not full and ray"

test-all: lint .venv/all.stamp
	@$(BIN)/pytest -n 2 -m "not ray"
	@$(BIN)/pytest -m ray

# torch with CUDA: see docs/gpu.md, PIP_ARGS.
gpu-test: .venv/all.stamp
	@$(BIN)/pytest -s tests/test_gpu.py tests/test_nccl_real.py

lint: .venv/dev.stamp
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: .venv/dev.stamp
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("zeropp-ray needs Python 3.10 or newer; make PYTHON=... names one" if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv .venv

.venv/run.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'Installing into .venv; this is done once and takes some minutes.'
	@$(BIN)/python -m pip install -qq $(PIP_ARGS) -c constraints.txt -e .
	@touch $@

.venv/bench.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'Installing into .venv; this is done once and takes some minutes.'
	@$(BIN)/python -m pip install -qq $(PIP_ARGS) -c constraints.txt -e '.[bench]'
	@touch $@ .venv/run.stamp

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'Installing into .venv; this is done once and takes some minutes.'
	@$(BIN)/python -m pip install -qq $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@ .venv/run.stamp

.venv/all.stamp: .venv/dev.stamp
	@$(BIN)/python -m pip install -qq $(PIP_ARGS) -c constraints.txt -e '.[dev,jobs,cuda]'
	@touch $@
