#!/usr/bin/env bash
# Downloads a model and converts it for Megatron: the reference, and what the critic starts from.
# Usage: bash scripts/prepare_model.sh NAME [--dry-run]     NAME is Qwen2.5-3B-Instruct, Qwen3-4B, ...
# SLIME_PATH, MEGATRON_PATH and MODELS are those of the run_*.sh scripts; HUB_OWNER is Qwen unless given.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EXPERIMENT=prepare MODEL=${1:?usage: bash scripts/prepare_model.sh NAME [--dry-run]} NUM_GPUS=1
shift
source scripts/lib/slime.sh
parse_options "$@"
model_arguments

run() {
  printf '%q ' "$@"
  echo
  [ -n "$DRY_RUN" ] || "$@"
}

[ -f "$HF_CHECKPOINT/config.json" ] || run hf download "${HUB_OWNER:-Qwen}/$MODEL" --local-dir "$HF_CHECKPOINT"
if [ ! -f "$REFERENCE/latest_checkpointed_iteration.txt" ]; then
  run env "PYTHONPATH=$SLIME_PATH:$MEGATRON_PATH" python3 "$SLIME_PATH/tools/convert_hf_to_torch_dist.py" \
    "${MODEL_ARGS[@]}" --hf-checkpoint "$HF_CHECKPOINT" --save "$REFERENCE"
fi
echo "ready: $HF_CHECKPOINT and $REFERENCE"
