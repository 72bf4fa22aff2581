# Everything is set up in .venv by the first target that needs it, and again when the dependencies change.
# The pinned torch is a large download. PYTHON=python3.12 chooses the interpreter of a new .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint bench clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python -m examples.demo

# What starts processes, locks databases or races threads is tested alone, the rest side by side.
# As root, with_postgres.sh may install PostgreSQL by apt; without one its tests are skipped.
ALONE := tests/search tests/store $(addprefix tests/test_,cli.py cli_demand.py demand.py dispatch.py store_faults.py tune.py)
ABREAST := -n auto --maxprocesses 8

test: lint
	tests/with_postgres.sh $(BIN)/python -m pytest $(ALONE)
	$(BIN)/python -m pytest $(ABREAST) $(addprefix --ignore=,$(ALONE))
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m interpret $(ABREAST)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.chains $(ARGS)

clean:
	rm -rf $(VENV) .demo build dist .mypy_cache .ruff_cache .pytest_cache

$(STAMP): pyproject.toml constraints.txt
	@echo "installing into $(VENV): minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,postgres]'
	touch $@
