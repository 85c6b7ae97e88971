PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet
WHEEL := build/wheel

.PHONY: env lint test demo bench docs wheel

env: .venv/.dev-installed

# Both install again when pyproject.toml has changed since the last time. Dependency groups need
# pip 25.1, which is newer than the pip of many Pythons.
.venv/.dev-installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) 'pip>=25.1'
	$(PIP) --editable '.[cli,demo,trainers]' --group dev
	$(PIP) --no-deps --group torchtitan
	touch $@

.venv/.docs-installed: .venv/.dev-installed
	$(PIP) --group docs
	touch $@

lint: env
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/typos

test: lint docs wheel
	$(BIN)/pytest

demo: env
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/train.py

bench: env
	$(BIN)/python benchmarks/optimizer_step.py
	$(BIN)/python benchmarks/host_time.py
	$(BIN)/python benchmarks/layouts.py
	$(BIN)/python benchmarks/orthogonalize.py

docs: .venv/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

wheel: env
	rm -rf $(WHEEL)
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir $(WHEEL) .
	$(BIN)/python .ci/try_wheel.py $(WHEEL)/*.whl
