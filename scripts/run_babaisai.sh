#!/usr/bin/env bash
# BabaIsAI (break the stop rule, reach the goal) as Verlog trained it, on a slime cluster: 4 GPUs unless NUM_GPUS says
# otherwise.
#   bash scripts/prepare_model.sh Qwen2.5-3B-Instruct
#   bash scripts/run_babaisai.sh          --help lists the options; run it again to resume
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CONFIG=${CONFIG:-custom_configs/babaisai.yaml}
MODEL=${MODEL:-Qwen2.5-3B-Instruct}
NUM_GPUS=${NUM_GPUS:-4}
TURNS=${TURNS:-256} STEP_TURNS=${STEP_TURNS:-128}   # turns per batch, turns per training step
PROMPT_LEN=${PROMPT_LEN:-1024} RESPONSE_LEN=${RESPONSE_LEN:-384}
UPDATES=${UPDATES:-290}          # after the critic's warm-up

source scripts/lib/slime.sh
parse_options "$@"
build_arguments
submit
