# Everything a developer or continuous integration runs. `make help` lists the targets.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help install check test demo clean
help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: $(STAMP) ## create the virtual environment with pinned versions

# torch first and by exact version: an open range would pull a CUDA build of several GB onto a CPU machine.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

check: $(STAMP) ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: $(STAMP) ## the whole suite, on CPU
	OMP_NUM_THREADS=1 $(BIN)/pytest

clean: ## remove caches and the demo's output
	rm -rf demo .pytest_cache .mypy_cache .ruff_cache
