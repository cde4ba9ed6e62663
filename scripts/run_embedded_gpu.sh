#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct on BabyAI goto with the embedded engine and trainer, on one GPU with at least 40 GiB:
#   bash scripts/run_embedded_gpu.sh                      into outputs/pretrained/
#   bash scripts/run_embedded_gpu.sh --model MODEL        another small model: a folder, or a name on the Hugging Face hub
#   bash scripts/run_embedded_gpu.sh --device cpu --updates 1 --turns 8 --step-turns 4 --demonstrations 1 \
#     --eval-episodes 2 --max-turns 2 --max-tokens 1024   a trial of minutes, without a GPU
# Options: --config YAML, --device cuda|cpu, --updates, --turns, --step-turns, --response-len, --context-len, --lr,
# --critic-lr, --max-tokens, --demonstrations, --eval-episodes, --max-turns, --seed, --out FOLDER,
# --overwrite.
# A model from the hub is downloaded once, into Hugging Face's cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/help.sh
help_if_asked "$@"
source scripts/install.sh
install envs,embedded
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
exec "$VENV/bin/python" -m embedded.pretrained "$@"
