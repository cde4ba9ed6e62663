#!/usr/bin/env bash
# Geometry problems with images on a slime cluster, with slime's own data set, outer loop and GRPO: 8 GPUs unless
# NUM_GPUS says otherwise. Each problem is played eight times, in whole episodes of up to three turns.
#   bash scripts/run_geo3k_vlm.sh                            Qwen3.5-4B: about 45 GB per GPU (calculated)
#   bash scripts/run_geo3k_vlm.sh --model Qwen3.5-35B-A3B    about 85 GB per GPU before the logits: not for 80 GB GPUs
# slime describes both models in its scripts/models/. qwen3.5-4B.sh describes the text model; this script adds slime's
# model provider for images. qwen3.5-35B-A3B-vl.sh is the one that slime's own example trains. The other dense sizes
# of Qwen3.5 (0.8B, 9B, 27B) are treated like the 4B; none of these runs has been made yet.
# The nodes that run environments need: pip install 'slime-verlog[questions]'. DATA is a folder with train.parquet
# (problem, answer, images) and, to evaluate, test.parquet; it is downloaded if it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

EXPERIMENT=geo3k_vlm
CONFIG=custom_configs/geo3k.yaml
MODEL=Qwen3.5-4B
NUM_GPUS=${NUM_GPUS:-8}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}
PROBLEMS=64 EPISODES=8            # a batch: problems, episodes of each
TURNS=$((PROBLEMS * EPISODES)) STEP_TURNS=$((PROBLEMS * EPISODES))
PROMPT_LEN=12288 RESPONSE_LEN=4096   # the prompt of the third turn holds two responses
UPDATES=3000
DATA=${DATA:-/root/datasets/geo3k_imgurl_processed}
DATA_SET=${DATA_SET:-VeraIsHere/geo3k_imgurl_processed}

given_engine_gpus=${ENGINE_GPUS:-}
source scripts/lib/slime.sh
source scripts/lib/models.sh

# slime has a file with images for the mixture-of-experts model only. For a dense model, this takes the file of the
# text model and puts slime's model provider for images in place of the text model's layers.
model_arguments() {
  local folder=$SLIME_PATH/scripts/models name=${MODEL/#Qwen/qwen}
  MODEL_ARGS=()
  if [ -n "$FLAT" ]; then
    describe_model_in_lines "$name"
  elif [ -f "$folder/$name-vl.sh" ]; then
    # shellcheck source=/dev/null
    source "$folder/$name-vl.sh"
  elif [ -f "$folder/$name.sh" ] && [[ $MODEL == Qwen3.5-* ]]; then
    # shellcheck source=/dev/null
    source "$folder/$name.sh"
    [ "${MODEL_ARGS[0]}" = --spec ] || die "$folder/$name.sh does not begin with --spec; name another model"
    MODEL_ARGS[1]=slime_plugins.models.qwen3_5_vl MODEL_ARGS[2]=get_qwen3_5_vl_model_provider
  else
    [ -n "$DRY_RUN" ] || die "$folder has neither $name-vl.sh nor a Qwen3.5; name a model that slime trains with pictures"
    echo "note: $folder has no $name.sh, so the model's flags are missing below" >&2
  fi
}

# The same choice as shell lines, which --flat prints. Without a slime checkout, a mixture is taken for slime's own.
describe_model_in_lines() {
  if [[ $MODEL == *-A*B ]]; then
    MODEL_LINES=("source \"\$SLIME_PATH/scripts/models/$1-vl.sh\"")
  else
    MODEL_LINES=(
      "source \"\$SLIME_PATH/scripts/models/$1.sh\"  # the text model; the next line adds slime's pictures"
      "MODEL_ARGS[1]=slime_plugins.models.qwen3_5_vl MODEL_ARGS[2]=get_qwen3_5_vl_model_provider"
    )
  fi
}

parse_options "$@"
REFERENCE=$HF_CHECKPOINT
if [[ $MODEL == *-A*B ]]; then experts=$NUM_GPUS; else experts=1; fi
EXPERTS=${EXPERTS:-$experts}         # GPUs that share a mixture's experts; 1 for a dense model
ENGINE_GPUS=${given_engine_gpus:-$EXPERTS}
write_config
model_arguments
cluster_arguments

# One role, so that Megatron's own rotation is enough: it deletes a checkpoint once the next one is complete.
CKPT_ARGS=(--hf-checkpoint "$HF_CHECKPOINT" --save "$ACTOR_DIR" --save-interval 20)
[ "$CHECKPOINTS_KEPT" = all ] || CKPT_ARGS+=(--save-retain-interval 20)
[ "$(last_step "$ACTOR_DIR")" -ge 0 ] && CKPT_ARGS+=(--load "$ACTOR_DIR") || CKPT_ARGS+=(--load "$HF_CHECKPOINT")
HOOK_ARGS=(
  --custom-config-path "$CONFIG_FILE"
  --custom-generate-function-path rollout.generate.generate
  --custom-rollout-log-function-path inspection.metrics.log_rollout
  --custom-eval-rollout-log-function-path inspection.metrics.log_eval_rollout
  --prompt-data "$DATA/train.parquet"
  --input-key problem
  --label-key answer
  --multimodal-keys '{"image": "images"}'
  --rollout-shuffle
)
ROLLOUT_ARGS=(
  --num-rollout "$UPDATES"
  --rollout-batch-size "$PROBLEMS"
  --n-samples-per-prompt "$EPISODES"
  --global-batch-size "$TURNS"
  --rollout-max-response-len "$RESPONSE_LEN"
  --rollout-max-context-len $((PROMPT_LEN + RESPONSE_LEN))
  --rollout-temperature 1
)
EVAL_ARGS=()
if [ -f "$DATA/test.parquet" ]; then
  EVAL_ARGS=(--eval-interval 20 --eval-prompt-data geo3k "$DATA/test.parquet" --n-samples-per-eval-prompt 1)
fi
PPO_ARGS=(
  --advantage-estimator grpo
  --kl-coef 0.0
  --entropy-coef 0.0
  --eps-clip 0.2
  --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
  --optimizer adam
  --lr "${ACTOR_LR:-1e-6}"
  --lr-decay-style constant
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.98
)
PERF_ARGS=(
  --tensor-model-parallel-size "$TENSOR_PARALLEL"
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size "$EXPERTS"
  --expert-tensor-parallel-size 1
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
  --micro-batch-size 1
)
[ "$TENSOR_PARALLEL" -eq 1 ] || PERF_ARGS+=(--sequence-parallel)
SGLANG_ARGS=(
  --rollout-num-gpus-per-engine "$ENGINE_GPUS"
  --sglang-ep-size "$EXPERTS"
  --sglang-mem-fraction-static "${MEM_FRACTION:-0.6}"
)

if [ -z "$DRY_RUN" ]; then
  download_model
  if [ ! -f "$DATA/train.parquet" ] || was_interrupted "$DATA"; then
    run hf download --repo-type dataset "$DATA_SET" --local-dir "$DATA"
  fi
fi
submit
