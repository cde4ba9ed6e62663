#!/usr/bin/env bash
# ALFWorld's household tasks on a slime cluster: 4 GPUs unless NUM_GPUS says otherwise.
#   bash scripts/prepare_model.sh Qwen2.5-3B-Instruct
#   export ALFWORLD_DATA=/data/alfworld   # from alfworld-download
#   bash scripts/run_alfworld.sh          --help lists the options; run it again to resume
# The nodes that run environments need the games' engine: pip install 'slime-verlog[alfworld]'.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

CONFIG=${CONFIG:-custom_configs/alfworld.yaml}
MODEL=${MODEL:-Qwen2.5-3B-Instruct}
NUM_GPUS=${NUM_GPUS:-4}
TURNS=${TURNS:-256} STEP_TURNS=${STEP_TURNS:-128}   # turns per batch, turns per training step
PROMPT_LEN=${PROMPT_LEN:-2048} RESPONSE_LEN=${RESPONSE_LEN:-384}
UPDATES=${UPDATES:-295}          # after the critic's warm-up

source scripts/lib/slime.sh
parse_options "$@"
build_arguments
# Ray may have been started in another shell, which does not know the folder of the data set.
[ -z "${ALFWORLD_DATA:-}" ] || JOB_ENV+=("ALFWORLD_DATA=$ALFWORLD_DATA")
submit
