# Everything a developer or continuous integration runs. `make help` lists the targets.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# On Linux the torch of the usual index is the CUDA build. Without a GPU, TORCH_INDEX=URL with the address of
# PyTorch's own index of CPU builds saves gigabytes.
TORCH_INDEX ?=
# Tests that run at the same time; each may start up to 8 ranks of its own.
JOBS ?= 2

.PHONY: help install check test demo docs clean
help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

install: $(STAMP) ## create the virtual environment with pinned versions

# torch first and by exact version, so that nothing later brings another build of it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

check: $(STAMP) ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: $(STAMP) ## the whole suite, on CPU
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(JOBS) --dist worksteal

demo: $(STAMP) ## prepare data, train on 4 ranks, stop, resume at another layout, generate: about 5 minutes on 2 cores
	$(BIN)/python examples/demo.py

docs: $(STAMP) ## the pages of docs/ and the reference from docstrings, into site/
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

clean: ## remove caches and the demo's output; prepared data stays
	rm -rf runs/demo runs/demo.log .pytest_cache .mypy_cache .ruff_cache
