#!/usr/bin/env bash
# Turns a checkpoint of a run into a Hugging Face folder, which scripts/evaluate.sh and any engine can serve.
#   bash scripts/export_model.sh /root/runs/babyai-Qwen2.5-3B-Instruct Qwen2.5-3B-Instruct [STEP] [--dry-run]
# The arguments are the run's folder and the model that it started from, as MODELS/NAME or as a folder. It takes the last
# step unless STEP is given, writes RUN/hf/STEP and needs no GPU. SLIME_PATH, MEGATRON_PATH and MODELS are those of the
# run_*.sh scripts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/help.sh
help_if_asked "$@"
[ $# -ge 2 ] || { print_header >&2; exit 2; }

EXPERIMENT=export MODEL=$2 NUM_GPUS=1 DRY_RUN=
source scripts/lib/slime.sh
source scripts/lib/models.sh
run_dir=$1 origin=$2
[[ $run_dir == /* ]] || run_dir=$OLDPWD/$run_dir
shift 2
step=$(last_step "$run_dir/actor")
for word in "$@"; do
  case $word in
    --dry-run) DRY_RUN=yes ;;
    *[!0-9]* | '') die "STEP must be the number of a step, got '$word'" ;;
    *) step=$word ;;
  esac
done
[ -d "$origin" ] || origin=$MODELS/$origin
[ -f "$origin/config.json" ] || die "$origin holds no Hugging Face model"
checkpoint=$run_dir/actor/$(printf 'iter_%07d' "$step")
[ -d "$checkpoint" ] || die "no $checkpoint; the run has saved no actor yet, or not at that step"

# Megatron pads the vocabulary to a multiple of the GPUs that share it; the folder has the model's own size.
vocabulary=$(python3 -c 'import json, sys
config = json.load(open(sys.argv[1]))
print((config.get("text_config") or config)["vocab_size"])' "$origin/config.json")
run env "PYTHONPATH=$SLIME_PATH:$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}" \
  python3 "$SLIME_PATH/tools/convert_torch_dist_to_hf.py" --input-dir "$checkpoint" --output-dir "$run_dir/hf/$step" \
  --origin-hf-dir "$origin" --vocab-size "$vocabulary"
echo "ready: $run_dir/hf/$step"
