#!/usr/bin/env bash
# Supervised training on scripted play, to start PPO from, on a slime cluster: 4 GPUs unless NUM_GPUS says otherwise.
#   bash scripts/prepare_model.sh Qwen2.5-3B-Instruct
#   bash scripts/run_sft.sh                                         BabyAI; --help lists the options
#   CONFIG=custom_configs/crafter.yaml EPISODES=100 bash scripts/run_sft.sh
# PPO then starts from what it saved. REFERENCE is where actor and critic start, and what KL is measured against:
#   REFERENCE=/root/runs/sft-babyai-Qwen2.5-3B-Instruct/actor bash scripts/run_babyai.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source scripts/lib/help.sh
refuse_variables "supervised training makes EPOCHS passes in steps of BATCH turns" TURNS STEP_TURNS UPDATES PRETRAINED_CRITIC

CONFIG=${CONFIG:-custom_configs/babyai.yaml}
EXPERIMENT=${EXPERIMENT:-sft-$(basename "$CONFIG" .yaml)}
MODEL=${MODEL:-Qwen2.5-3B-Instruct}
NUM_GPUS=${NUM_GPUS:-4}
EPISODES=${EPISODES:-60} EPOCHS=${EPOCHS:-3} BATCH=${BATCH:-32}   # demonstrated episodes, passes, turns per step
PROMPT_LEN=${PROMPT_LEN:-2048} RESPONSE_LEN=${RESPONSE_LEN:-512}   # for the size of micro-batches only

source scripts/lib/slime.sh

usage_of_batches() {
  cat << END
  EPISODES=$EPISODES, EPOCHS=$EPOCHS, BATCH=$BATCH    demonstrated episodes, passes over them, turns per training step
  DEMONSTRATIONS=${DEMONSTRATIONS:-}    a .jsonl or .parquet file with yours; unset: they are played
END
}

parse_options "$@"
counts EPISODES EPOCHS BATCH
write_config
model_arguments
cluster_arguments

# The demonstrations: yours (DEMONSTRATIONS, .jsonl or .parquet), or played now, once.
DATA=${DEMONSTRATIONS:-$RUN_DIR/demonstrations.jsonl}
if [ -z "$DRY_RUN" ] && [ ! -f "$DATA" ]; then
  python3 -m inspection.demonstrations --config "$CONFIG_FILE" --episodes "$EPISODES" --out "$DATA"
fi
PREPARATION="[ -f \"$DATA\" ] || PYTHONPATH=\$REPO python3 -m inspection.demonstrations --config \"\$RUN_DIR/config.yaml\" \\
  --episodes $EPISODES --out \"$DATA\""  # what --flat prints
case $MODEL in
  Qwen3.5*) MASK=qwen3_5 ;;
  Qwen3*) MASK=qwen3 ;;
  *) MASK=qwen ;;
esac

LAYOUT_ARGS=(
  --actor-num-nodes "$NUM_NODES"
  --actor-num-gpus-per-node "$NUM_GPUS"
  --num-gpus-per-node "$NUM_GPUS"
)
CKPT_ARGS=(
  --hf-checkpoint "$HF_CHECKPOINT"
  --ref-load "$REFERENCE"
  --load "$ACTOR_DIR"
  --save "$ACTOR_DIR"
  --save-interval 100
)
[ "$CHECKPOINTS_KEPT" = all ] || CKPT_ARGS+=(--save-retain-interval 100)
HOOK_ARGS=(
  --custom-config-path "$CONFIG_FILE"
  --rollout-function-path slime.rollout.sft_rollout.generate_rollout
)
ROLLOUT_ARGS=(
  --prompt-data "$DATA"
  --input-key messages
  --metadata-key metadata
  --loss-mask-type "$MASK"
  --rollout-shuffle
  --num-epoch "$EPOCHS"
  --rollout-batch-size "$BATCH"
  --global-batch-size "$BATCH"
)
EVAL_ARGS=() SGLANG_ARGS=()
PPO_ARGS=(
  --loss-type sft_loss
  --calculate-per-token-loss
  --disable-compute-advantages-and-returns
  --debug-train-only
)
OPTIMIZER_ARGS=(
  --optimizer adam
  --lr "${ACTOR_LR:-1e-5}"
  --lr-decay-style cosine
  --min-lr 1e-6
  --lr-warmup-fraction 0.1
  --weight-decay 0.1
  --adam-beta1 0.9
  --adam-beta2 0.95
  --clip-grad 1.0
)
submit
