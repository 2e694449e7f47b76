# make demo      set up, run the main job, say where the report lies
# make check     lint, types and pure tests: while you work
# make test      and all that starts processes: everything that a change can break
# make test-all  and long matrices, all fault drills, all seeds: CONTRIBUTING.md says which tier holds what
# make docs      the documentation as a site on http://localhost:8000; docs-build writes it to site/
# make docs-generate  write the pages that come from the code and from measurements anew
# make dist   the wheel and the source distribution, checked, in dist/
# make bench  measure; with NANOGPT=FOLDER, a checkout of https://github.com/karpathy/nanoGPT, beside that too
PYTHON ?= python3
BIN := .venv/bin
# One worker a core for pure tests. Others wait for time-outs and processes: one worker more keeps the cores busy.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)
PYTEST := $(BIN)/python -m pytest
PARALLEL := --dist worksteal -n
# Tests start hundreds of processes, and without cached bytecode each would compile evener anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check unit test test-all lint format bench dist docs docs-build docs-generate clean

demo: .venv/installed
	$(BIN)/evener demo

# mypy has one thread: the tests use the other cores meanwhile.
check: .venv/tools
	$(MAKE) --no-print-directory -j 2 lint unit

unit: .venv/tools
	$(PYTEST) $(PARALLEL) $(WORKERS) tests/unit src --ignore=src/evener/worker

test: check
	$(PYTEST) $(PARALLEL) $$(($(WORKERS) + 1)) tests src/evener/worker --ignore=tests/unit

test-all: lint
	$(BIN)/mypy --python-version 3.14
	$(PYTEST) $(PARALLEL) $$(($(WORKERS) + 1)) --exhaustive -m 'not alone'
	$(PYTEST) --exhaustive -m alone

lint: .venv/tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/tools
	$(BIN)/python bench/throughput_vs_ddp.py
	$(BIN)/python bench/recorder_overhead.py
	$(BIN)/python bench/corpus_preparation.py
ifdef NANOGPT
	$(BIN)/python bench/loss_vs_nanogpt.py --nanogpt $(NANOGPT)
	$(BIN)/python bench/throughput_vs_nanogpt.py --nanogpt $(NANOGPT)
	$(BIN)/python bench/throughput_vs_nanogpt.py --nanogpt $(NANOGPT) --threads 2
	$(BIN)/python bench/throughput_vs_nanogpt.py --nanogpt $(NANOGPT) --compile
	$(BIN)/python bench/throughput_vs_nanogpt.py --nanogpt $(NANOGPT) --compile --threads 2
	$(BIN)/python bench/throughput_vs_nanogpt.py --nanogpt $(NANOGPT) --dtype auto
else
	@echo "left out: what is measured beside nanoGPT; with a checkout of it: make bench NANOGPT=FOLDER"
endif

dist: .venv/tools
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*

docs: .venv/tools
	$(BIN)/zensical serve

docs-build: .venv/tools
	$(BIN)/zensical build --clean --strict

docs-generate: .venv/tools
	$(BIN)/python docs/generate/reference.py
	$(BIN)/python docs/generate/published.py
	$(BIN)/python docs/generate/fast.py
	$(BIN)/python docs/generate/gpu.py
	$(BIN)/python docs/generate/log.py

# Without bytecode, which a first import makes: of most of the modules nobody imports any.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PIP_INSTALL) '.[lab]'
	@touch $@

# What the tests, the linters and the documentation need besides
.venv/tools: .venv/installed
	$(BIN)/python $(PIP_INSTALL) '.[dev]'
	@touch $@

clean:
	rm -rf .venv data runs experiments site .cache
