# `make demo` and `make test` do everything on a fresh machine; `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
RANKS ?= 2
DEMO_ARGS ?=
BENCH_ARGS ?=
FAULTS_ARGS ?=
PYTEST_ARGS ?=

# One thread per rank: with several ranks on a few cores more threads only wait for each other.
RUN := source scripts/mpi_environment.sh; export PATH="$(abspath $(VENV))/bin:$$PATH" OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1};
READY := $(VENV)/.ready

.PHONY: help environment demo test test-full test-faults test-gpu bench bench-gpu lint docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

environment: $(READY) ## make .venv with torch, this package, its extras and an MPI (again only when pyproject.toml changed)

$(READY): pyproject.toml scripts/make_environment.sh
	@bash scripts/make_environment.sh "$(PYTHON)" "$(VENV)"

demo: $(READY) ## train a small GPT-2 on real text over RANKS=2 ranks; shows the plan and a falling loss
	@$(RUN) mpirun -np $(RANKS) python examples/train_gpt2.py $(DEMO_ARGS) </dev/null

# The tests for CPUs leave a GPU alone: their models would move to it, several ranks to one device.
test: $(READY) ## the tests but those for GPUs, the full matrix, and those that take long (TENTH=COMMIT: also a tenth of these)
	@$(RUN) CUDA_VISIBLE_DEVICES= python -m pytest tests/distributed tests/unit tests/test_architecture.py tests/test_hooks.py -n 2 --no-loadscope-reorder \
	$(if $(TENTH),--tenth $(TENTH)) $(PYTEST_ARGS) </dev/null

test-full: $(READY) ## all tests, with the whole matrix of models and plans, and the page in a browser (chromium, chromium-driver)
	@$(RUN) CUDA_VISIBLE_DEVICES= python -m pytest -m "full or not full" $(PYTEST_ARGS) </dev/null

test-faults: $(READY) ## plant faults in copies of the package: the tests must notice (FAULTS_ARGS="--only rows", "--tenth COMMIT", "--help")
	@$(RUN) CUDA_VISIBLE_DEVICES= python -m tests.planted_faults $(FAULTS_ARGS) </dev/null

test-zoo: $(READY) ## models of the zoo that were exact must be so still (ZOO_ARGS="--tenth COMMIT"; without, all are tried)
	@$(RUN) CUDA_VISIBLE_DEVICES= python tests/benchmarks/model_zoo.py $(ZOO_ARGS) </dev/null

test-gpu: $(READY) ## the tests that need a CUDA device; fails without one, and if any test is skipped or none is chosen
	@$(RUN) python -m pytest tests/gpu --require-gpu -m "full or not full" $(PYTEST_ARGS) </dev/null

bench: $(READY) ## step time beside torch.distributed.pipelining, DDP and plain torch.compile; prints JSON
	@$(RUN) python tests/benchmarks/pipeline_step.py $(BENCH_ARGS) </dev/null

bench-gpu: $(READY) ## kernels, step, backward, profile and host time on a GPU; prints JSON lines (BENCH_ARGS="--tiny --device cpu" runs anywhere)
	@$(RUN) python -m tests.benchmarks.all_gpu $(BENCH_ARGS) </dev/null

lint: $(READY) ## ruff, mypy, import contracts, size limits and hooks
	@$(RUN) ruff check . && python scripts/check_types.py && \
	python -m pytest -q tests/test_architecture.py tests/test_hooks.py </dev/null

docs: $(READY) ## write what is generated in docs/: options, errors, the API reference, the history of benchmarks, the drawing of imports
	@$(RUN) rannc config --markdown >docs/configuration.md
	@$(RUN) rannc errors --markdown >docs/troubleshooting.md
	@$(RUN) python -m scripts.api_reference
	@$(RUN) python -m scripts.benchmark_history
	@$(RUN) python -m scripts.draw_imports --page docs/architecture.md

clean: ## remove the environment and caches
	@rm -rf "$(VENV)" build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache .import_linter_cache
