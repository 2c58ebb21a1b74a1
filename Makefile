# Everything a fresh machine needs is Python >= 3.11 and make; each target builds what it leans on, once.
#
#   make train   train a small language model on real text, here, in about two minutes   (ARGS="..." is handed on)
#   make test    the tests                                                               (ARGS="tests/data -k loader")
#   make test-all  the tests with their long forms
#   make lint    ruff and mypy
#   make test-xla  the tests of PyTorch/XLA, on its last release and torch 2.9 in an environment of their own (about 7 GB)
#   make test-oldest  some of the tests on the oldest versions that work, in an environment of their own (about 7 GB)
#   make bench   run the benchmarks and write their figures into docs/benchmarks.md
#   make wheel   build the wheel into dist/
#   make docs    build the documentation into site/
#
# TORCH=2.14.1 takes that release of torch instead of the one in constraints.txt, in an environment of its own:
#   make test PYTHON=python3.13 TORCH=2.14.1

PYTHON ?= python3
TORCH  ?=
VENV   ?= .venv$(if $(TORCH),-$(notdir $(PYTHON))-torch-$(TORCH))
ARGS   ?=
# Each test process uses one thread, and often waits for others that it started: three of them keep two cores busy.
JOBS   ?= $(shell $(PYTHON) -c "import os; print(min(12, 3 * (os.cpu_count() or 1) // 2))")

BIN := $(VENV)/bin
# The versions to install; a release of torch that was asked for takes the place of the pinned one.
PINS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(PINS)

.PHONY: train test test-all test-xla test-oldest lint format bench docs wheel clean
.DEFAULT_GOAL := train

train: $(VENV)/.installed-train
	$(BIN)/windlass train $(ARGS)

# Bytecode is written whatever the shell says: tests start many processes, each of which would compile the package.
FOR_TESTS := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
test: $(VENV)/.installed-dev
	$(FOR_TESTS) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-all: $(VENV)/.installed-dev
	$(FOR_TESTS) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow or not slow" --hypothesis-profile=long $(ARGS)

# On one device and on four, and what a release of torch before the pinned one does without PyTorch/XLA: trains, is killed
# and resumed, on one process and on two.
XLA := .venv-xla
ON_XLA := $(FOR_TESTS) PJRT_DEVICE=CPU $(XLA)/bin/python -m pytest -p no:xdist
test-xla:
	$(MAKE) VENV=$(XLA) TORCH=2.9.0 $(XLA)/.installed-xla
	$(ON_XLA) tests/xla $(ARGS)
	CPU_NUM_DEVICES=4 $(ON_XLA) tests/xla $(ARGS)
	USE_TORCH_XLA=0 $(ON_XLA) -m "not dist and not slow" tests/trainer/test_resume.py tests/engine tests/xla/test_older_torch.py $(ARGS)

# What other versions change: attention, layouts and their files, models of transformers, adapters.
OLDEST := .venv-oldest
OLDEST_TESTS := tests/engine tests/forecast tests/metrics tests/precision tests/core/test_optional.py \
	tests/accelerator/test_own_loop.py tests/config tests/compat tests/data/test_foreign_loader.py tests/text \
	$(patsubst %,tests/finetuning/test_%.py,peft_adapters pipeline_ranks preference_data sft_images \
	sft_trainer) \
	$(patsubst %,tests/trainer/test_%.py,column_checks continuing own_state pipeline_runs resume) \
	$(patsubst %,tests/transforms/test_%.py,compile context ddp document_attention document_images expert_layers \
	expert_plan fsdp recompute tensor_plan tensor_sequence whole_balance)
test-oldest:
	$(MAKE) VENV=$(OLDEST) PINS=constraints-oldest.txt $(OLDEST)/.installed-oldest
	$(FOR_TESTS) $(OLDEST)/bin/python -m pytest -n $(JOBS) --dist worksteal $(OLDEST_TESTS) $(ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks/*.py benchmarks/script_recipes/*.py

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/startup.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/overhead.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/call_path.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/distributed.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/distributed.py --deepspeed --write docs/benchmarks.md
	$(BIN)/python benchmarks/checkpoint.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/contention.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/text_preparation.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/page.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/sft.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/sft_images.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/loss_memory.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/preferences.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/hub.py --write docs/benchmarks.md
	$(BIN)/python benchmarks/gpu.py --write docs/benchmarks.md

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m hatchling build -t wheel -d dist

clean:
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp is newer than what it was made from, so a second call installs nothing. torch comes first and pinned: whatever
# else asks for torch finds it there, and the resolver never goes looking for another build of it.
$(VENV)/.installed-python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Windlass needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	touch $@

ifneq ($(TORCH),)
$(PINS): $(VENV)/.installed-python constraints.txt
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@
endif

$(VENV)/.installed-torch: $(VENV)/.installed-python $(PINS)
	@echo "Installing torch (once) ..."
	$(PIP) torch numpy
	touch $@

$(VENV)/.installed-train: $(VENV)/.installed-torch pyproject.toml
	@echo "Installing windlass (once) ..."
	$(PIP) -e ".[train]"
	touch $@

$(VENV)/.installed-xla: $(VENV)/.installed-torch pyproject.toml
	$(PIP) torch_xla==2.9.0 -e ".[train,datasets]" pytest pytest-timeout pytest-xdist hypothesis
	touch $@

$(VENV)/.installed-oldest: $(VENV)/.installed-torch pyproject.toml
	$(PIP) -e ".[hf,datasets,peft]" accelerate pytest pytest-timeout pytest-xdist hypothesis pillow scikit-learn pandas
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-torch pyproject.toml
	@echo "Installing windlass with everything its tests compare it with (once) ..."
	$(PIP) -e ".[all,test,lint,docs,bench]"
	touch $@ $(VENV)/.installed-train
