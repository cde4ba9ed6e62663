#!/usr/bin/env bash
# Supervised training on scripted play, to start PPO from, on a slime cluster: 4 GPUs unless NUM_GPUS says otherwise.
#   bash scripts/prepare_model.sh Qwen2.5-3B-Instruct
#   bash scripts/run_sft.sh                                         BabyAI; --help lists the options
#   CONFIG=custom_configs/crafter.yaml EPISODES=100 bash scripts/run_sft.sh
# PPO then starts from what it saved. REFERENCE is where actor and critic start, and what KL is measured against:
#   REFERENCE=/root/runs/sft-Qwen2.5-3B-Instruct/actor bash scripts/run_babyai.sh
SETTINGS=(
  CONFIG=custom_configs/babyai.yaml MODEL=Qwen2.5-3B-Instruct NUM_GPUS=4
  EPISODES=60 EPOCHS=3 BATCH=32      # demonstrated episodes, passes, turns per step
  PROMPT_LEN=2048 RESPONSE_LEN=512   # for the size of micro-batches only
)
cd "$(dirname "$0")/.." && exec python3 -m scripts.launcher.sft "$0" "${SETTINGS[@]}" -- "$@"
