#!/usr/bin/env bash
# Crafter with SAO (single-rollout asynchronous optimisation), on a slime cluster: 8 GPUs unless NUM_GPUS says otherwise.
# Half of them serve and keep playing while the others train, up to max_staleness. docs/presets.md explains the
# settings that differ from run_crafter.sh, and which of them the paper leaves open.
#   bash scripts/prepare_model.sh Qwen2.5-7B-Instruct
#   bash scripts/run_sao.sh               --help lists the options; run it again to resume
SETTINGS=(
  CONFIG=custom_configs/crafter_sao.yaml MODEL=Qwen2.5-7B-Instruct
  NUM_GPUS=8 TENSOR_PARALLEL=2 MEM_FRACTION=0.75
  CRITIC_LR=5.0e-6
  TURNS=2048 STEP_TURNS=1024         # turns per batch, turns per training step
  PROMPT_LEN=4096 RESPONSE_LEN=512   # in tokens
  UPDATES=280                        # after the critic's
  CRITIC_ONLY=10                     # batches that train the critic alone, unless it is a pretrained one
)
cd "$(dirname "$0")/.." && exec python3 -m scripts.launcher.sao "$0" "${SETTINGS[@]}" -- --disaggregated "$@"
