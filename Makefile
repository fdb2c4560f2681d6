# Two commands: `make demo` and `make test`. Both make .venv themselves; a second call is quick. `make quick` is for those who change code.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/pip --disable-pip-version-check -q
FEDAGG := $(VENV)/bin/fedagg

.PHONY: demo test quick docs lint bench clean

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "fedagg needs Python 3.11 or newer: make demo PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing fedagg into $(VENV) (once)"
	$(PIP) install -c constraints.txt -e '.[analysis]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing fedagg with its development extra into $(VENV) (once)"
	$(PIP) install -c constraints.txt -e '.[dev,flower]'
	@touch $@ $(VENV)/.run

demo: $(VENV)/.run
	@$(FEDAGG) compare fedagg,fedavg --dataset mnist-mini --model linear --partition shards --rounds 30 --out demo/$$(date +%Y%m%d-%H%M%S)

test: $(VENV)/.dev lint
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

quick: $(VENV)/.dev lint
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check src tests tools benchmarks examples
	$(VENV)/bin/ruff format --check src tests tools benchmarks examples
	$(VENV)/bin/mypy

docs: $(VENV)/.dev
	$(VENV)/bin/mkdocs build --strict --site-dir site

bench: $(VENV)/.run
	$(FEDAGG) bench

clean:
	rm -rf $(VENV) site demo runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
