#!/usr/bin/env bash
# ALFWorld's household tasks on a slime cluster: 4 GPUs unless NUM_GPUS says otherwise.
#   bash scripts/prepare_model.sh Qwen2.5-3B-Instruct
#   export ALFWORLD_DATA=/data/alfworld   # from alfworld-download
#   bash scripts/run_alfworld.sh          --help lists the options; run it again to resume
# The nodes that run environments need the games' engine: pip install 'slime-verlog[alfworld]'.
SETTINGS=(
  CONFIG=custom_configs/alfworld.yaml MODEL=Qwen2.5-3B-Instruct NUM_GPUS=4
  TURNS=256 STEP_TURNS=128           # turns per batch, turns per training step
  PROMPT_LEN=2048 RESPONSE_LEN=384   # in tokens
  UPDATES=295                        # after the critic's warm-up
  JOB_VARIABLES=ALFWORLD_DATA        # Ray may have been started in another shell, which does not know this folder
)
cd "$(dirname "$0")/.." && exec python3 -m scripts.launch "$0" "${SETTINGS[@]}" -- "$@"
