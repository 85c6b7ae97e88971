PYTHON ?= python3
BIN := .venv/bin

# Without its dependencies, which tests do not need and which downgrade those of transformers.
INSTALL_TORCHTITAN_dev := $(BIN)/pip install --quiet --no-deps \
	torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0

.PHONY: env lint test demo bench docs

env: .venv/.dev-installed

# Reinstalls when pyproject.toml has changed since the last time.
.venv/.%-installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[$*]'
	$(INSTALL_TORCHTITAN_$*)
	touch $@

lint: env
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/typos

test: env lint
	$(BIN)/pytest

demo: env
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/train.py

bench: env
	$(BIN)/python benchmarks/optimizer_step.py
	$(BIN)/python benchmarks/host_time.py
	$(BIN)/python benchmarks/layouts.py
	$(BIN)/python benchmarks/orthogonalize.py

docs: .venv/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
