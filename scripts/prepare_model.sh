#!/usr/bin/env bash
# Downloads a model and converts it for Megatron: the reference, and what the critic starts from.
#   bash scripts/prepare_model.sh NAME [--images] [--dry-run]     NAME is Qwen2.5-3B-Instruct, Qwen3-4B, ...
# --images converts the part that sees, too (for run_crafter_vlm.sh), into a folder of its own.
# An interrupted download or conversion goes on. SLIME_PATH, MEGATRON_PATH and MODELS are those of the run_*.sh scripts;
# HUB_OWNER is Qwen unless given.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/help.sh
help_if_asked "$@"
[ $# -ge 1 ] || { print_header >&2; exit 2; }

EXPERIMENT=prepare MODEL=$1 NUM_GPUS=1
shift
source scripts/lib/slime.sh
source scripts/lib/models.sh
if [ "${1:-}" = --images ]; then
  source scripts/lib/vision.sh
  shift
fi
parse_options "$@"
model_arguments

download_model
if [ ! -f "$REFERENCE/latest_checkpointed_iteration.txt" ]; then
  run env "PYTHONPATH=$SLIME_PATH:$MEGATRON_PATH" python3 "$SLIME_PATH/tools/convert_hf_to_torch_dist.py" \
    "${MODEL_ARGS[@]}" --hf-checkpoint "$HF_CHECKPOINT" --save "$REFERENCE"
fi
[ -n "$DRY_RUN" ] || echo "ready: $HF_CHECKPOINT and $REFERENCE"
