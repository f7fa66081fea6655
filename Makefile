# a2t. `make` alone lists what there is.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.a2t-setup
CLIENTS := .venv-clients
ARGS   ?=
OUT    ?= out/bench-serve

.DEFAULT_GOAL := help
.PHONY: help setup clients demo monitoring test lint eval bench-serve bench-train clean

help:
	@echo "make setup   make .venv and install a2t there, every package at the version in constraints.txt"
	@echo "make demo    set up, then hold a ten-minute spoken conversation     (options: ARGS='--keep')"
	@echo "make monitoring  Prometheus on this machine over an endpoint that runs here, until Ctrl-C"
	@echo "make test    set up, then run the tests                             (options: ARGS='tests/kv -x')"
	@echo "make clients make .venv-clients: Pipecat, LiveKit and openai-agents, whose tests are skipped without it"
	@echo "make lint    set up, then ruff and mypy"
	@echo "make eval    set up, then measure the embedded default into out/    (options: ARGS='--sessions 2')"
	@echo "make bench-serve  set up, then measure the engine into out/bench-serve   (options: OUT=DIR ARGS='--quick')"
	@echo "make bench-train  set up, then measure a training step into out/bench-train (options: OUT=DIR ARGS='--sizes tiny')"
	@echo "make clean   remove .venv and the tools' caches"
	@echo "Another interpreter than python3: make setup PYTHON=python3.12"

setup: $(STAMP)
	@echo "a2t: $(VENV) is ready"

# Made again when the packages asked for, or their versions, have changed.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
		echo "a2t: there is no '$(PYTHON)' on this machine. Install Python 3.11 or newer, or name one: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "a2t: Python 3.11 or newer is needed and '$(PYTHON)' is $$($(PYTHON) -c 'import platform; print(platform.python_version())'). Name another: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "a2t: '$(PYTHON)' cannot make virtual environments (its modules venv and ensurepip are missing). On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@[ -x $(BIN)/python ] && $(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		echo "a2t: making $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV) || { echo "a2t: $(VENV) could not be made; see above" >&2; exit 1; }; }
	@echo "a2t: installing the packages of constraints.txt into $(VENV) (about 2 GB; some minutes the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --quiet -c constraints.txt -e '.[dev]' </dev/null || { \
		echo "a2t: the packages could not be installed. pip says why above; most often the package registry cannot be reached or the disk is full. Run it again when that is mended: what is there already is kept." >&2; exit 1; }
	@touch $@

# These want other versions of what Ray wants, so they live apart.
clients: $(CLIENTS)/.a2t-setup
	@echo "a2t: $(CLIENTS) is ready"

$(CLIENTS)/.a2t-setup: tests/clients/requirements.txt
	@echo "a2t: installing the stock clients of tests/clients into $(CLIENTS) (about 700 MB)"
	@$(PYTHON) -m venv --clear $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps -r $< </dev/null
	@touch $@

demo: $(STAMP)
	@echo "a2t: starting the demonstration"
	@$(BIN)/python -m jobs.demo $(ARGS)

monitoring: $(STAMP)
	@$(BIN)/python -m jobs.monitoring $(ARGS)

test: $(STAMP)
	@echo "a2t: running the tests"
	@$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(ARGS)

lint: $(STAMP)
	@echo "a2t: ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "a2t: mypy"
	@$(BIN)/mypy

eval: $(STAMP)
	@echo "a2t: measuring the embedded default"
	@$(BIN)/python -m jobs.evaluate --suite embedded --out out/embedded $(ARGS)

bench-serve: $(STAMP)
	@echo "a2t: measuring the engine into $(OUT)"
	@$(BIN)/python -m jobs.bench_serve --out $(OUT) $(ARGS)

bench-train: OUT = out/bench-train
bench-train: $(STAMP)
	@echo "a2t: measuring a training step"
	@$(BIN)/python -m jobs.bench_train --out $(OUT) $(ARGS)

clean:
	rm -rf $(VENV) $(CLIENTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis
