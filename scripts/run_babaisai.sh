#!/usr/bin/env bash
# BabaIsAI (break the stop rule, reach the goal) as Verlog trained it, on a slime cluster: 4 GPUs unless NUM_GPUS says
# otherwise.
#   bash scripts/prepare_model.sh Qwen2.5-3B-Instruct
#   bash scripts/run_babaisai.sh          --help lists the options; run it again to resume
SETTINGS=(
  CONFIG=custom_configs/babaisai.yaml MODEL=Qwen2.5-3B-Instruct NUM_GPUS=4
  TURNS=256 STEP_TURNS=128           # turns per batch, turns per training step
  PROMPT_LEN=1024 RESPONSE_LEN=384   # in tokens
  UPDATES=290                        # after the critic's warm-up
)
cd "$(dirname "$0")/.." && exec python3 -m scripts.launch "$0" "${SETTINGS[@]}" -- "$@"
