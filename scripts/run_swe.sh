#!/usr/bin/env bash
# Fixing bugs in repositories on a slime cluster: 8 GPUs unless NUM_GPUS says otherwise.
#   bash scripts/prepare_model.sh Qwen3-8B
#   bash scripts/run_swe.sh               --help lists the options; run it again to resume
# The nodes that run environments need bubblewrap, and: pip install 'slime-verlog[swe]'.
SETTINGS=(
  CONFIG=custom_configs/swe.yaml MODEL=Qwen3-8B
  NUM_GPUS=8 TENSOR_PARALLEL=2 MAX_TOKENS_PER_GPU=16384
  TURNS=512 STEP_TURNS=256           # turns per batch, turns per training step
  PROMPT_LEN=14336 RESPONSE_LEN=2048 # in tokens
  UPDATES=295                        # after the critic's warm-up
)
cd "$(dirname "$0")/.." && exec python3 -m scripts.launch "$0" "${SETTINGS[@]}" -- "$@"
