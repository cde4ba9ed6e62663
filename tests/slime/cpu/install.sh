#!/usr/bin/env bash
# Makes a virtual environment in which slime's train.py runs on CPU (2.7 GB, some minutes). Usage: install.sh FOLDER
# slime itself is not installed: SLIME_PATH names a checkout. Megatron's training package comes out of miles_rl's wheel.
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
"${PYTHON:-python3.11}" -m venv "$folder"
pip=("$folder/bin/python" -m pip install -q --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
# Megatron refuses NumPy 2, and slime calls wandb.util.generate_id, which wandb 0.28.2 lacks.
"${pip[@]}" "numpy<2" transformers==5.23.0 "ray>=2.50" aiohttp httpx requests pyyaml omegaconf safetensors accelerate \
  sglang-router==0.3.2 tensorboard "wandb<=0.28.0" psutil pillow tqdm pybase64 pylatexenc packaging six triton fastapi uvicorn \
  gymnasium minigrid==3.2.0 crafter==1.8.3 einops zstandard
# Transformers' image processors need torchvision; its operators do not load beside a torch for CPUs (cuda_on_cpu.py).
"${pip[@]}" --no-deps torchvision==0.28.0
"${pip[@]}" --no-deps miles_rl==0.0.2
echo "export SLIME_CPU_PYTHON=$(cd "$folder" && pwd)/bin/python"
