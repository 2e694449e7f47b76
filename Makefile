# make demo   set up, run the main job, say where the report lies
# make test   set up, run the whole test suite
# make bench  measure; with NANOGPT=FOLDER, a checkout of https://github.com/karpathy/nanoGPT, beside that too
PYTHON ?= python3
BIN := .venv/bin
# Three workers share two cores with the ranks that they start: much of the time is spent waiting for hosts.
PYTEST_WORKERS ?= 3

.PHONY: demo test lint format bench docs clean

demo: .venv/installed
	$(BIN)/evener bench --force

test: .venv/installed
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/installed
	$(BIN)/python bench/against_ddp.py
	$(BIN)/python bench/overhead.py
	$(BIN)/python bench/prepare.py
ifdef NANOGPT
	$(BIN)/python bench/learning.py --nanogpt $(NANOGPT)
	$(BIN)/python bench/against_nanogpt.py --nanogpt $(NANOGPT)
	$(BIN)/python bench/against_nanogpt.py --nanogpt $(NANOGPT) --compile
	$(BIN)/python bench/against_nanogpt.py --nanogpt $(NANOGPT) --dtype auto
else
	@echo "left out: what is measured beside nanoGPT; with a checkout of it: make bench NANOGPT=FOLDER"
endif

docs: .venv/installed
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/published.py
	$(BIN)/python docs/fast.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv data runs experiments
