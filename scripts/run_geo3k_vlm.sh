#!/usr/bin/env bash
# Geometry problems with images on a slime cluster, with slime's own data set, outer loop and GRPO: 8 GPUs unless
# NUM_GPUS says otherwise. Each problem is played eight times, in whole episodes of up to three turns.
#   bash scripts/run_geo3k_vlm.sh                            Qwen3.5-4B: about 45 GB per GPU (calculated)
#   bash scripts/run_geo3k_vlm.sh --model Qwen3.5-35B-A3B    about 85 GB per GPU before the logits: not for 80 GB GPUs
# slime's own example trains the second. None of these runs has been made on GPUs yet. Run it again to resume.
# The nodes that run environments need: pip install 'slime-verlog[questions]'. DATA is a folder with train.parquet
# (problem, answer, images) and, to evaluate, test.parquet; it is downloaded if it is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/lib/help.sh
refuse_variables "a batch is PROBLEMS x EPISODES whole episodes, and there is no critic" TURNS STEP_TURNS PRETRAINED_CRITIC

[ -n "${CONFIG:-}" ] || EXPERIMENT=${EXPERIMENT:-geo3k_vlm}
CONFIG=${CONFIG:-custom_configs/geo3k.yaml}
MODEL=${MODEL:-Qwen3.5-4B}
NUM_GPUS=${NUM_GPUS:-8}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}
PROBLEMS=${PROBLEMS:-64} EPISODES=${EPISODES:-8}   # a batch: problems, episodes of each
PROMPT_LEN=${PROMPT_LEN:-12288} RESPONSE_LEN=${RESPONSE_LEN:-4096}   # the third turn's prompt holds two responses
UPDATES=${UPDATES:-3000}
DATA=${DATA:-/root/datasets/geo3k_imgurl_processed}
DATA_SET=${DATA_SET:-VeraIsHere/geo3k_imgurl_processed}

given_engine_gpus=${ENGINE_GPUS:-}
source scripts/lib/slime.sh
source scripts/lib/models.sh
source scripts/lib/vision.sh

usage_of_batches() {
  cat << END
  PROBLEMS=$PROBLEMS, EPISODES=$EPISODES    problems per batch, episodes of each
  UPDATES=$UPDATES    batches
  PROMPT_LEN=$PROMPT_LEN, RESPONSE_LEN=$RESPONSE_LEN    longest prompt and response, in tokens
  DATA=$DATA    train.parquet and test.parquet; downloaded from DATA_SET=$DATA_SET
  EXPERTS=${EXPERTS:-}    GPUs that share a mixture's experts; unset: all of a node, 1 for a dense model
  ENGINE_GPUS=$given_engine_gpus    GPUs per engine; unset: EXPERTS
END
}

parse_options "$@"
REFERENCE=$HF_CHECKPOINT
if [[ $MODEL == *-A*B ]]; then experts=$NUM_GPUS; else experts=1; fi
EXPERTS=${EXPERTS:-$experts}
ENGINE_GPUS=${given_engine_gpus:-$EXPERTS}
counts PROBLEMS EPISODES UPDATES PROMPT_LEN RESPONSE_LEN
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
  --custom-megatron-init-path advantage.patch.images.install
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
  --global-batch-size $((PROBLEMS * EPISODES))
  --rollout-max-response-len "$RESPONSE_LEN"
  --rollout-max-context-len $((PROMPT_LEN + RESPONSE_LEN))
  --rollout-temperature 1
)
EVAL_ARGS=()
if [ -f "$DATA/test.parquet" ]; then
  EVAL_ARGS=(--eval-interval "${EVAL_INTERVAL:-20}" --eval-prompt-data geo3k "$DATA/test.parquet" --n-samples-per-eval-prompt 1)
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
