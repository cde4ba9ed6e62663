#!/usr/bin/env bash
# Geometry problems with images on a slime cluster, with slime's own data set, outer loop and GRPO: 8 GPUs unless
# NUM_GPUS says otherwise. Each problem is played eight times, in whole episodes of up to three turns.
#   bash scripts/run_geo3k_vlm.sh                            Qwen3.5-4B: about 45 GB per GPU (calculated)
#   bash scripts/run_geo3k_vlm.sh --model Qwen3.5-35B-A3B    about 85 GB per GPU before the logits: not for 80 GB GPUs
# slime's own example trains the second. None of these runs has been made on GPUs yet. Run it again to resume.
# The nodes that run environments need: pip install 'slime-verlog[questions]'. DATA is a folder with train.parquet
# (problem, answer, images) and, to evaluate, test.parquet; it is downloaded if it is missing.
SETTINGS=(
  CONFIG=custom_configs/geo3k.yaml MODEL=Qwen3.5-4B
  NUM_GPUS=8 TENSOR_PARALLEL=2
  PROBLEMS=64 EPISODES=8                # a batch: problems, episodes of each
  PROMPT_LEN=12288 RESPONSE_LEN=4096    # the third turn's prompt holds two responses
  UPDATES=3000
  DATA=/root/datasets/geo3k_imgurl_processed
)
cd "$(dirname "$0")/.." && exec python3 -m scripts.launcher.geo3k "$0" "${SETTINGS[@]}" -- "$@"
