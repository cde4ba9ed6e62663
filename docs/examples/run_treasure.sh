#!/usr/bin/env bash
# Treasure on a slime cluster: 4 GPUs unless NUM_GPUS says otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EXPERIMENT=treasure
CONFIG=custom_configs/treasure.yaml
MODEL=Qwen2.5-3B-Instruct
NUM_GPUS=${NUM_GPUS:-4}
TURNS=256 STEP_TURNS=128          # turns per batch, turns per training step
PROMPT_LEN=1024 RESPONSE_LEN=384
UPDATES=100

source scripts/lib/slime.sh
parse_options "$@"
build_arguments
submit
