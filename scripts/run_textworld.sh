#!/usr/bin/env bash
# TextWorld's generated text adventures on a slime cluster: 4 GPUs unless NUM_GPUS says otherwise.
#   bash scripts/prepare_model.sh Qwen2.5-3B-Instruct
#   bash scripts/run_textworld.sh         --help lists the options; run it again to resume
# The nodes that run environments need the games' engine: pip install 'slime-verlog[text-games]'.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CONFIG=${CONFIG:-custom_configs/textworld.yaml}
MODEL=${MODEL:-Qwen2.5-3B-Instruct}
NUM_GPUS=${NUM_GPUS:-4}
TURNS=${TURNS:-256} STEP_TURNS=${STEP_TURNS:-128}   # turns per batch, turns per training step
PROMPT_LEN=${PROMPT_LEN:-2048} RESPONSE_LEN=${RESPONSE_LEN:-384}
UPDATES=${UPDATES:-295}          # after the critic's warm-up

source scripts/lib/slime.sh
parse_options "$@"
build_arguments
submit
