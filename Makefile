# Every target sets itself up: `make demo` or `make test` is the first and only thing to type after a clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LIGHT := $(VENV)/.light

.PHONY: demo test test-slow lint bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

$(LIGHT): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $(LIGHT)

demo: $(LIGHT)  ## train several methods on the digits and write runs/demo/report.html
	$(BIN)/fedveil compare --out runs/demo

test: $(STAMP) lint  ## what CI runs
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)  ## ratios against hand-written loops, in one run
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
