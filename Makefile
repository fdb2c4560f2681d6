# Two commands: `make demo` and `make test`. Both make .venv themselves; a second call is quick. `make quick` is for those who change code.
PYTHON ?= python3
VENV := .venv
INSTALL := $(VENV)/bin/python tools/install.py -c constraints.txt
FEDAGG := $(VENV)/bin/fedagg
# Keep what Python compiles, whatever the shell says: otherwise every process that the tests start compiles torch again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test quick lint style types tests docs bench clean

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedagg needs Python 3.11 or newer: make demo PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing fedagg into $(VENV) (once)"
	$(INSTALL) -e '.[analysis]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing fedagg with its development extra into $(VENV) (once)"
	$(INSTALL) -e '.[dev,flower]'
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run
	@$(FEDAGG) compare fedagg,fedavg --dataset mnist-mini --model linear --partition shards --rounds 30 --out demo/$$(date +%Y%m%d-%H%M%S)

# mypy has one core to work on and leaves the other to the tests.
test: style
	@$(MAKE) --no-print-directory -j 2 types tests

quick: style
	@$(MAKE) --no-print-directory -j 2 types tests TESTS='-m "not slow"'

lint: style types

style: $(VENV)/.dev
	$(VENV)/bin/ruff check src tests tools benchmarks examples
	$(VENV)/bin/ruff format --check src tests tools benchmarks examples

types: $(VENV)/.dev
	$(VENV)/bin/mypy

# Three workers on two cores: tests of real processes wait more than they compute.
tests: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)

docs: $(VENV)/.dev
	$(VENV)/bin/mkdocs build --strict --site-dir site

bench: $(VENV)/.run
	$(FEDAGG) bench

clean:
	rm -rf $(VENV) site demo runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
