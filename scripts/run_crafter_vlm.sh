#!/usr/bin/env bash
# Crafter with a picture in every observation, PPO and window memory, on a slime cluster: 8 GPUs unless NUM_GPUS says
# otherwise. The settings are those of run_crafter.sh, with a model that sees. No such run has been made on GPUs yet.
#   bash scripts/prepare_model.sh Qwen3.5-4B --images
#   bash scripts/run_crafter_vlm.sh       --help lists the options; run it again to resume
# The nodes that run environments need: pip install pillow.
SETTINGS=(
  CONFIG=custom_configs/crafter_vlm.yaml MODEL=Qwen3.5-4B NUM_GPUS=8 TENSOR_PARALLEL=2
  TURNS=2048 STEP_TURNS=1024         # turns per batch, turns per training step
  PROMPT_LEN=4096 RESPONSE_LEN=512   # in tokens
  UPDATES=280                        # after the critic's warm-up
)
cd "$(dirname "$0")/.." && exec python3 -m scripts.launch "$0" "${SETTINGS[@]}" -- --images "$@"
