#!/usr/bin/env bash
# Treasure on a slime cluster: 4 GPUs unless NUM_GPUS says otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CONFIG=${CONFIG:-custom_configs/treasure.yaml}
MODEL=${MODEL:-Qwen2.5-3B-Instruct}
NUM_GPUS=${NUM_GPUS:-4}
TURNS=${TURNS:-256} STEP_TURNS=${STEP_TURNS:-128}   # turns per batch, turns per training step
PROMPT_LEN=${PROMPT_LEN:-1024} RESPONSE_LEN=${RESPONSE_LEN:-384}
UPDATES=${UPDATES:-100}
CRITIC_ONLY=${CRITIC_ONLY:-20}    # batches before them that train the critic alone: its value head begins at random

source scripts/lib/slime.sh
parse_options "$@"
build_arguments
submit
