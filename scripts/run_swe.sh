#!/usr/bin/env bash
# Fixing bugs in repositories on a slime cluster: 8 GPUs unless NUM_GPUS says otherwise.
#   bash scripts/prepare_model.sh Qwen3-8B
#   bash scripts/run_swe.sh               --help lists the options; run it again to resume
# The nodes that run environments need bubblewrap, and: pip install 'slime-verlog[swe]'.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CONFIG=${CONFIG:-custom_configs/swe.yaml}
MODEL=${MODEL:-Qwen3-8B}
NUM_GPUS=${NUM_GPUS:-8}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}
TURNS=${TURNS:-512} STEP_TURNS=${STEP_TURNS:-256}   # turns per batch, turns per training step
PROMPT_LEN=${PROMPT_LEN:-14336} RESPONSE_LEN=${RESPONSE_LEN:-2048}
UPDATES=${UPDATES:-295}          # after the critic's warm-up
MAX_TOKENS_PER_GPU=${MAX_TOKENS_PER_GPU:-16384}

source scripts/lib/slime.sh
parse_options "$@"
build_arguments
submit
