# ctcdraft: `make help` lists the targets; options go in ARGS="head.layers=3 optim.lr=1e-3".
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
ARGS ?=
# One process per GPU that CUDA_VISIBLE_DEVICES leaves; without one, a process per core, at most four: of two threads the
# second one mostly waits. Those on a CPU share OMP_NUM_THREADS out among them.
LAUNCH = $$($(BIN)/python -c "import os, torch; gpus = torch.cuda.device_count(); cores = len(os.sched_getaffinity(0)); \
	ranks = gpus or (1 if cores < 2 else 2 if cores < 4 else 4); \
	print('env OMP_NUM_THREADS=%s $(BIN)/python launch/ranks.py %d' \
	% (os.environ.get('OMP_NUM_THREADS', cores // max(1, gpus) or 1), ranks) if ranks > 1 else '$(BIN)/python')")
# Whole files go to a process per core, in the order of tests/conftest.py.
PYTEST = $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup train eval export serve test engine test-serve check lint bench ablation soak fuzz conventions doctor docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP)  ## make .venv with everything in it

$(STAMP): pyproject.toml constraints.txt
	@test ! -e .venv/.begun || rm -rf .venv  # an installation that was cut off: pip would take its halves for wholes
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (about 1.6 GB, a few minutes the first time)"
	@touch .venv/.begun
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@rm .venv/.begun && touch $@

train: $(STAMP)  ## base, its answers, head, export, eval; ends with a table
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(LAUNCH) launch/train.py $(ARGS)

eval: $(STAMP)  ## decode a benchmark with a run's head: ARGS="name=<run> bench=..."
	@$(BIN)/python launch/eval.py $(ARGS)

export: $(STAMP)  ## write a run's best head as a folder: ARGS="name=<run>"
	@$(BIN)/python launch/export.py $(ARGS)

serve: $(STAMP)  ## vLLM's OpenAI-compatible server with a run's head: ARGS="name=<run> port=8000"
	@$(BIN)/python launch/serve.py $(ARGS)

test: $(STAMP)  ## run the tests, a process per core and at most four
	@$(PYTEST) $(ARGS)

engine: $(STAMP)  ## make .venv-vllm, vLLM's environment (3.4 GB), where it is not there
	@$(BIN)/python -c "from pathlib import Path; from ctcdraft.launch.serve import engine_python; engine_python(Path('.venv-vllm'))"

test-serve: engine  ## the tests of serving in vLLM itself, in an environment of its own
	@$(BIN)/python -m pytest tests/serve/test_engine.py $(ARGS)

check: $(STAMP)  ## the fast tests: what a minute can tell
	@$(PYTEST) -m "not slow" $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy -p ctcdraft

bench: $(STAMP)  ## loss, training step and tree search side by side with what they replace: ARGS="--grid gpu"
	@$(BIN)/python bench/fused_ctc.py $(ARGS)
	@$(BIN)/python bench/train_step.py
	@$(BIN)/python bench/decode.py
	@$(BIN)/python bench/tree.py

ablation: $(STAMP)  ## variants of head and objective, trained for as long, counted side by side: ARGS="--hours 3 experiment=smollm2"
	@$(BIN)/python bench/ablation.py $(ARGS)

soak: $(STAMP)  ## kill a run 30 times at random moments, compare with one never killed: ARGS="--zero 2 --ranks 2"
	@$(BIN)/python tests/helpers/soak.py $(ARGS)

fuzz: $(STAMP)  ## broken input at every public edge, counted: ARGS="--inputs 6000 --seed 1"
	@$(BIN)/python tests/helpers/fuzz.py $(ARGS)

conventions: $(STAMP)  ## rows in every convention, each value followed into tokens, counts or rejects: ARGS="--templates <folder>"
	@$(BIN)/python tests/helpers/conventions.py $(ARGS)

doctor: $(STAMP)  ## what will not work, before the start: machine, base, template, memory, time: ARGS="--json base=..."
	@$(BIN)/python launch/doctor.py $(ARGS)

docs: $(STAMP)  ## the docs as a site in build/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:  ## remove runs, caches and .venv
	rm -rf build runs .cache .venv .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
