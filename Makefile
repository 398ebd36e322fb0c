# Two commands do everything: `make demo` and `make test`. Each installs what it needs into .venv.
PYTHON ?= python3
SEED ?= 1
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test cover check test-full test-gpu clean

# The walk through a model's whole life; SEED=2 raises another village.
demo: .venv/.demo
	$(BIN)/foundling demo --seed $(SEED)

# What CI runs: the checks, then every test but the GPU's and the full-size ones.
test: check
	$(BIN)/python -m pytest -n 3

# The same tests with their coverage, which must not fall below 85%; half as long again.
cover: .venv/.dev
	$(BIN)/python -m pytest -n 3 --cov --cov-report=term:skip-covered

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Every figure that an issue asks for, at full size; resumable, writes docs/evidence/*.json.
test-full: .venv/.dev
	$(BIN)/python -m tests.full $(ONLY)

# On a machine with a GPU, with the packages that are there; JOBS=7 runs them side by side
# (pytest-xdist), since most of a test is compilation on one core, and what measures time after them.
GPU_PYTEST := $(PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir . --confcutdir tests tests/gpu
test-gpu:
	$(GPU_PYTEST) -m "not alone" $(if $(JOBS),-n $(JOBS))
	$(GPU_PYTEST) -m alone

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e .
	touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e '.[dev,hf,ray,datatrove,datasets,torchao,lm-eval,grammar]'
	$(BIN)/python -m foundling.eval.lm_eval_run register
	touch $@ .venv/.demo

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*

# How large the package is and how it is divided; tests/structure holds each figure to a limit.
.PHONY: shape
shape: .venv/.dev
	@$(BIN)/python -m tests.structure.shape
