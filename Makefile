# `make up` sets up and runs Millrace; `make test` sets up and runs the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PACKAGES := bench bus cli gateway millrace registry engine runtime scheduler schemas simulation telemetry workers
DATA   ?= data

.PHONY: setup own-environment up test test-changed test-all measure-tests lint types imports check bench docs engines engines-vllm test-engines test-gpu test-clients clean

setup: $(READY)

# Programs in a copied environment start the Python of the original checkout.
own-environment:
	@if [ -e $(BIN)/millrace ] && ! head -n 2 $(BIN)/millrace | grep -qF '$(CURDIR)/$(BIN)/'; then \
	  echo "$(CURDIR)/$(VENV) was made for another checkout and would run that checkout's code." >&2; \
	  echo "Remove it (rm -rf $(VENV)), then run make setup." >&2; \
	  exit 1; \
	fi

$(READY): pyproject.toml constraints.txt | own-environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Millrace needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[embedded,rdma,dev]'
	$(BIN)/python -m millrace.engine.kernels.build
# Otherwise each of the first processes compiles the same modules.
	$(BIN)/python -m compileall -q -j 0 $(PACKAGES) benchmarks
	@touch $(READY)

up: setup  ## run everything on this machine, e.g. make up ARGS="--port 9000 --workers 2"
	$(BIN)/millrace up --data $(DATA) $(ARGS)

# Tests often wait, so one process more than there are cores uses the CPUs fully.
PROCESSES ?= $(shell nproc | awk '{ print ($$1 < 3) ? $$1 + 1 : 4 }')

# Slow tests to run: all, none, or some (tests affected by the change and a tenth of the others).
SLOW ?= some
# The commit since which files count as changed; empty: see `python -m tests.runner --help`.
BASE ?=
SINCE = $(if $(BASE),--base $(BASE))
PYTEST = $(BIN)/python -m pytest --numprocesses $(PROCESSES)

test: setup  ## the fast tests and some of the slow ones, or the tests that ARGS selects
ifdef ARGS
	$(BIN)/pytest $(ARGS)
else
	$(PYTEST) --slow $(SLOW) $(SINCE)
endif

test-changed: setup  ## the fast tests affected by a change; ARGS=--explain gives the reasons
	$(BIN)/python -m tests.runner $(SINCE) $(ARGS) -- --numprocesses $(PROCESSES)

test-all: setup  ## every test
	$(PYTEST) --slow all

measure-tests: setup  ## every test; write the CPU time of each test file to tests/runner/measured.json
	$(PYTEST) --slow all --cpu-times --save-measured

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

check: lint types imports test

bench: setup  ## overhead of the whole path compared with the engine alone
	$(BIN)/python -m benchmarks.system --only walk $(ARGS)

docs: setup  ## documentation site in build/site; fails for broken links
	$(BIN)/python -m tools.site

engines: setup  ## llama.cpp's server and tools, built from source into .engines
	deploy/engines/install-llamacpp $(BIN)/python

test-engines: setup  ## the tests of third-party engines that are installed
	$(BIN)/pytest -m "vllm or llamacpp" $(ARGS)

test-gpu: setup  ## the tests that need a CUDA device
	TEST_GPU=1 $(BIN)/pytest -m gpu tests/gpu $(ARGS)

test-clients: setup  ## tests of third-party clients with a running system; ARGS selects clients
	$(BIN)/python -m tests.clients.run $(ARGS)

engines-vllm:  ## vLLM for CPUs, in a separate environment under .engines
	deploy/engines/install-vllm $(PYTHON)

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
