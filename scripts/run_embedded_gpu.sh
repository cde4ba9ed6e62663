#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct on BabyAI goto with the embedded engine and trainer, on one GPU with at least 40 GiB:
#   bash scripts/run_embedded_gpu.sh                      into outputs/pretrained/
#   bash scripts/run_embedded_gpu.sh --model MODEL        another small model: a folder, or a name on the Hugging Face hub
#   CUDA_VISIBLE_DEVICES= bash scripts/run_embedded_gpu.sh --updates 1 --demonstrations 1 --episodes 2 --set max_turns=2 \
#     --set-flag rollout_batch_size=8 --set-flag global_batch_size=4     a trial of minutes, without a GPU
# It is slime-verlog train with the flags below. Its other options: --config YAML, --seed, --seeds, --out FOLDER, --resume,
# --set KEY=VALUE, --set-flag NAME=VALUE. A model from the hub is downloaded once.
cd "$(dirname "$0")/.."
source scripts/lib/help.sh
source scripts/install.sh
install envs,embedded
if [ -z "${CUDA_VISIBLE_DEVICES+set}" ] && ! "$VENV/bin/python" -c "import torch; assert torch.cuda.is_available()" 2> /dev/null; then
  echo "error: torch finds no CUDA device; take a machine with a GPU, or set CUDA_VISIBLE_DEVICES= to train on the CPU" >&2
  exit 1
fi
flags=(rollout_batch_size=256 global_batch_size=64 rollout_max_response_len=48 rollout_max_context_len=1024)
flags+=(lr=5e-6 critic_lr=2e-5 adam_beta2=0.999 max_tokens_per_gpu=8192 save_interval=20)
exec "$VENV/bin/python" -m embedded.quickstart --model HuggingFaceTB/SmolLM2-135M-Instruct --updates 60 \
  --out outputs/pretrained "${flags[@]/#/--set-flag=}" ${OPTIONS[@]+"${OPTIONS[@]}"} "$@"
