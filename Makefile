# VLLM=gpu installs the GPU build of vLLM, VLLM=core none; cpu becomes core where it cannot be had.
VLLM ?= cpu
ours = $(shell $(1) -c 'import sys; (3, 11) <= sys.version_info[:2] <= (3, 12) or sys.exit(1)' 2>/dev/null && echo $(1))
ifndef PYTHON
PYTHON := $(firstword $(foreach name,python3.11 python3.12 python3,$(call ours,$(name))))
endif
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(VLLM)
TEST_STAMP := $(STAMP)-dev
LOCKS := $(wildcard requirements/*)

export HF_HUB_OFFLINE ?= 1
export DO_NOT_TRACK ?= 1
export MLFLOW_DISABLE_TELEMETRY ?= true
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: install locks test test-slow test-gpu campaign lint demo docs clean benchmarks

install: $(STAMP)

$(BIN)/uv:
	test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed: PYTHON=... make demo"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv

$(STAMP): pyproject.toml $(LOCKS) | $(BIN)/uv
	$(BIN)/python requirements/install.py $(VLLM)
	touch $@

$(TEST_STAMP): pyproject.toml $(LOCKS) | $(BIN)/uv
	$(BIN)/python requirements/install.py $(VLLM) --dev
	touch $(STAMP) $@

locks: | $(BIN)/uv
	UV=$(BIN)/uv requirements/lock.sh

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports & imports=$$!; $(BIN)/mypy; typed=$$?; wait $$imports && exit $$typed

# Two at a time, a file's tests on one worker: they share what its fixtures start. The longest files
# are begun first (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations=25

test: lint
	$(PYTEST)

test-slow: $(TEST_STAMP)
	$(PYTEST) -m "slow and not campaign"

# On a machine with one NVIDIA GPU: VLLM=gpu make test-gpu.
test-gpu: $(TEST_STAMP)
	$(BIN)/python -m pytest -m gpu tests/gpu

campaign: $(TEST_STAMP)
	$(BIN)/python -m pytest -m campaign

demo: install
	$(BIN)/earl demo

# Into build/site; `build/site/index.html` opens from the disk, too.
docs: $(TEST_STAMP)
	PYTHONPATH=. $(BIN)/python docs/site/configuration.py
	PYTHONPATH=. $(BIN)/python docs/site/gateway_fields.py
	PYTHONPATH=. $(BIN)/python docs/site/families.py
	PYTHONPATH=. $(BIN)/python docs/site/metrics.py
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -f docs/site/mkdocs.yml

# dispatch_local is not among them: its table has ways that it measures no more.
BENCHMARKS := overhead rollout iteration update reshard publish gateway dispatch_hosts dispatch_scale hosts selector_paper selector_live history

benchmarks: install
	$(BIN)/uv pip install -q --python $(BIN)/python --group bench
	for name in $(BENCHMARKS); do \
		$(BIN)/python -m benchmarks.$$name --markdown benchmarks/results/$$name.md || exit 1; \
	done

clean:
	$(BIN)/earl shards sweep || true
	rm -rf runs models
