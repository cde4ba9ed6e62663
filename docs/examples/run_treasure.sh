#!/usr/bin/env bash
# Treasure on a slime cluster: 4 GPUs unless NUM_GPUS says otherwise.
SETTINGS=(
  CONFIG=custom_configs/treasure.yaml MODEL=Qwen2.5-3B-Instruct NUM_GPUS=4
  TURNS=256 STEP_TURNS=128           # turns per batch, turns per training step
  PROMPT_LEN=1024 RESPONSE_LEN=384   # in tokens
  UPDATES=100
  CRITIC_ONLY=20                     # batches before them that train the critic alone: its value head begins at random
)
cd "$(dirname "$0")/.." && exec python3 -m scripts.launch "$0" "${SETTINGS[@]}" -- "$@"
