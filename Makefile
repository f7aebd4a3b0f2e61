# On a fresh machine `make demo` or `make test` is all that is needed: each sets up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint docs setup clean

demo: $(READY)
	$(BIN)/xl-export demo --out demo --force

test: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# the site, in build/site; ends with an error at a dead link or a page that is in no menu
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo build dist *.egg-info
