#!/usr/bin/env bash
# Downloads a model and converts it for Megatron: the reference, and what the critic starts from.
#   bash scripts/prepare_model.sh NAME [--images] [--dry-run]     NAME is Qwen2.5-3B-Instruct, Qwen3-4B, ...
# --images converts the part that sees, too (for run_crafter_vlm.sh), into its own folder.
# An interrupted download or conversion goes on. SLIME_PATH, MEGATRON_PATH and MODELS are those of the run_*.sh scripts;
# HUB_OWNER is Qwen unless given.
cd "$(dirname "$0")/.." && exec python3 -m scripts.launcher.convert "$0" "$@"
