#!/usr/bin/env bash
# Turns a checkpoint of a run into a Hugging Face folder, which scripts/evaluate.sh and any engine can serve.
#   bash scripts/export_model.sh /root/runs/babyai-Qwen2.5-3B-Instruct Qwen2.5-3B-Instruct [STEP] [--dry-run]
# The arguments are the run's folder and the model that it started from, as MODELS/NAME or as a folder. It takes the last
# step unless STEP is given, writes RUN/hf/STEP and needs no GPU. SLIME_PATH, MEGATRON_PATH and MODELS are those of the
# run_*.sh scripts.
[ $# -lt 2 ] || set -- "$(realpath -ms "$1")" "${@:2}"
cd "$(dirname "$0")/.." && exec python3 -m scripts.launcher.convert "$0" "$@"
