#!/usr/bin/env bash
# Crafter as Verlog trained it, on a slime cluster: 8 GPUs unless NUM_GPUS says otherwise. By Verlog's published hours, an
# update takes 13 minutes on 8 H100 (docs/slime_cluster.md, Time), and what differs from Verlog is listed there, too.
#   bash scripts/prepare_model.sh Qwen2.5-7B-Instruct
#   bash scripts/run_crafter.sh           --help lists the options; run it again to resume
SETTINGS=(
  CONFIG=custom_configs/crafter.yaml MODEL=Qwen2.5-7B-Instruct
  NUM_GPUS=8 TENSOR_PARALLEL=2 MEM_FRACTION=0.75
  TURNS=2048 STEP_TURNS=1024         # turns per batch, turns per training step
  PROMPT_LEN=4096 RESPONSE_LEN=512   # in tokens
  UPDATES=280                        # after the critic's warm-up
)
cd "$(dirname "$0")/.." && exec python3 -m scripts.launch "$0" "${SETTINGS[@]}" -- "$@"
