#!/usr/bin/env bash
# TextWorld's generated text adventures on a slime cluster: 4 GPUs unless NUM_GPUS says otherwise.
#   bash scripts/prepare_model.sh Qwen2.5-3B-Instruct
#   bash scripts/run_textworld.sh         --help lists the options; run it again to resume
# The nodes that run environments need the games' engine: pip install 'slime-verlog[text-games]'.
SETTINGS=(
  CONFIG=custom_configs/textworld.yaml MODEL=Qwen2.5-3B-Instruct NUM_GPUS=4
  TURNS=256 STEP_TURNS=128           # turns per batch, turns per training step
  PROMPT_LEN=2048 RESPONSE_LEN=384   # in tokens
  UPDATES=295                        # after the critic's warm-up
)
cd "$(dirname "$0")/.." && exec python3 -m scripts.launch "$0" "${SETTINGS[@]}" -- "$@"
