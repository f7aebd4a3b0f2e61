# On a fresh machine `make demo` or `make test` is all that is needed: each sets up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint setup clean

demo: $(READY)
	$(BIN)/xl-export demo --out demo --force

test: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info
