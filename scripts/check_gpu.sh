#!/usr/bin/env bash
# Checks on a CUDA GPU what the tests check on a CPU: advantages, their exchange over NCCL, the embedded trainer.
#   bash scripts/check_gpu.sh                    installs into .venv as the other scripts do (torch's CUDA build)
#   PYTHON=python3 bash scripts/check_gpu.sh --as-is     with a Python that has everything, e.g. in slime's image
#   bash scripts/check_gpu.sh --device cpu       tries the checks themselves where there is no GPU
# --turns N, --longest N: how many turns are checked, and how long the longest is.
cd "$(dirname "$0")/.."
source scripts/lib/help.sh
export TQDM_DISABLE=1
if [ "${1:-}" = --as-is ]; then
  shift
  exec "${PYTHON:-python3}" -m tests.gpu.check "$@"
fi
source scripts/install.sh
install envs,embedded,dev
exec "$VENV/bin/python" -m tests.gpu.check "$@"
