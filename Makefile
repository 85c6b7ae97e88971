PYTHON ?= python3
BIN := .venv/bin

.PHONY: env lint test demo bench docs

env: .venv/.dev-installed

# Reinstalls when pyproject.toml has changed since the last time.
.venv/.%-installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[$*]'
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

docs: .venv/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
