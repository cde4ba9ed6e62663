#!/usr/bin/env bash
# Crafter as Verlog trained it, on a slime cluster: 8 GPUs. By Verlog's published hours, an update takes 13 minutes on
# 8 H100 (docs/slime.md, Time), and what differs from Verlog is listed there, too.
#
# Printed by: bash scripts/run_crafter.sh --flat
# It starts a new run, with the same flags as scripts/run_crafter.sh. That script also resumes a run, and it checks the
# flags before it uses a GPU.
set -euo pipefail

REPO=${REPO:-$PWD}  # the slime-verlog checkout
SLIME_PATH=${SLIME_PATH:-/root/slime}  # the checkout whose train.py runs
MEGATRON_PATH=${MEGATRON_PATH:-/root/Megatron-LM}
MODELS=${MODELS:-/root/models}  # scripts/prepare_model.sh puts checkpoints here
OUTPUT=${OUTPUT:-/root/runs}
RUN_DIR=$OUTPUT/crafter-Qwen2.5-7B-Instruct

[ -d "$REPO/rollout" ] || { echo "error: $REPO is not the slime-verlog checkout; set REPO" >&2; exit 2; }
[ ! -e "$RUN_DIR/critic" ] && [ ! -e "$RUN_DIR/actor" ] ||
  { echo "error: $RUN_DIR holds a run; resume it with: bash scripts/run_crafter.sh" >&2; exit 2; }
mkdir -p "$RUN_DIR"

cat > "$RUN_DIR/config.yaml" << 'END'
# yaml-language-server: $schema=schema.json
# Crafter as Verlog trained it. Pass it with --custom-config-path; babyai.yaml lists every key.

rollout_interaction_env_path: envs.crafter
env:
  preset: verlog           # verlog: defaults for training; balrog: no penalty, all achievements listed, 2,000 steps
  # reward: native         # achievements: 1 for each new one; final: their number at the end of the episode
  # binary_reward: false   # any reward above 0 becomes 1; native: 1 for new achievements, 0.1 per point of health
  # format_penalty: 0.1    # a response that names no action earns minus this instead of the reward
  # max_steps: 10000       # at most 10000, after which Crafter itself ends
  # open_achievements_only: true  # list only the achievements still to be reached, instead of all 22
  # vlm: false             # add BALROG's 256 x 256 image to every observation; the game stays the same
  # prompt_template: null  # a Jinja file that replaces the built-in instruction
tasks:
  - default
eval:
  episodes: 64             # held-out seeds
  max_turns: 500           # training waits for the evaluation, and a game can last 10,000 turns. For final results:
                           # slime-verlog evaluate ... --set eval.max_turns=10000

history: window
memory:
  kind: window
  n: 1                     # past turns shown
# max_turns: null          # turns after which an episode counts as truncated

n_env: 128                 # slots, each with one live episode; 16 turns each with 2,048 turns per batch
turn_quota: global
bootstrap_on_time_limit: false  # false (Verlog): running out of turns is failure
critic_warmup:             # --num-critic-only-steps must be w_epoch + w_iter
  w_epoch: 20
  w_iter: 20
  fraction: 0.45           # with steps of 1,024 turns, 20 x 2 + 20 x 18 = 400 steps of the critic, as in Verlog

env_backend: process

gamma_step: 0.99
lambda_step: 0.95
gamma_token: 1.0
lambda_token: 1.0
value_first_token_weight: 3.0
checkpoints_kept: 2
END

cat > "$RUN_DIR/roles.yaml" << END
megatron:
  - {name: default, role: critic, overrides: {lr: 1.0e-5, load: '$MODELS/Qwen2.5-7B-Instruct_torch_dist', save: '$RUN_DIR/critic'}}
END

source "$SLIME_PATH/scripts/models/qwen2.5-7B.sh"

LAYOUT_ARGS=(  # GPUs, and whether training and serving share them
  --colocate
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --num-gpus-per-node 8
)

CKPT_ARGS=(  # weights: where they come from and where they are saved
  --hf-checkpoint "$MODELS/Qwen2.5-7B-Instruct"
  --ref-load "$MODELS/Qwen2.5-7B-Instruct_torch_dist"
  --load "$RUN_DIR/actor"
  --save "$RUN_DIR/actor"
  --save-interval 20
  --megatron-config-path "$RUN_DIR/roles.yaml"
)

HOOK_ARGS=(  # what this project plugs into slime
  --custom-config-path "$RUN_DIR/config.yaml"
  --rollout-function-path rollout.fixed_turn.generate_rollout
  --data-source-path rollout.data_source.EpisodeSource
  --custom-convert-samples-to-train-data-path rollout.samples.convert_samples_to_train_data
  --custom-megatron-init-path advantage.patch.install
  --rollout-data-postprocess-path advantage.kl_split.log_kl_split
  --custom-rollout-log-function-path inspection.metrics.log_rollout
  --custom-eval-rollout-log-function-path inspection.metrics.log_eval_rollout
)

ROLLOUT_ARGS=(  # a batch: its turns, their lengths, sampling
  --num-rollout 320
  --rollout-batch-size 2048
  --n-samples-per-prompt 1
  --global-batch-size 1024
  --rollout-max-prompt-len 4096
  --rollout-max-response-len 512
  --rollout-max-context-len 4608
  --rollout-temperature 1
  --balance-data
)

EVAL_ARGS=(  # held-out episodes
  --eval-interval 64
  --skip-eval-before-train
  --eval-prompt-data held-out from-the-yaml
  --eval-top-k 1
)

PPO_ARGS=(  # advantages and losses
  --advantage-estimator ppo
  --num-critic-only-steps 40
  --normalize-advantages
  --kl-coef 0.001
  --kl-loss-type k1
  --entropy-coef 0.001
  --eps-clip 0.2
  --eps-clip-c 3.0
  --value-clip 0.5
  --calculate-per-token-loss
)

OPTIMIZER_ARGS=(  # optimizer
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --weight-decay 0.01
  --adam-beta1 0.9
  --adam-beta2 0.999
  --clip-grad 1.0
)

PERF_ARGS=(  # parallelism and memory of training
  --tensor-model-parallel-size 2
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --recompute-granularity full
  --recompute-method uniform
  --recompute-num-layers 1
  --use-dynamic-batch-size
  --max-tokens-per-gpu 18432
  --sequence-parallel
)

SGLANG_ARGS=(  # serving
  --rollout-num-gpus-per-engine 1
  --sglang-mem-fraction-static 0.75
)

TRACKING_ARGS=(  # where metrics go
  --use-tensorboard
  --tb-project-name slime-verlog
  --tb-experiment-name crafter-Qwen2.5-7B-Instruct
)

MISC_ARGS=(  # numerics
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --accumulate-allreduce-grads-in-fp32
  --attention-softmax-in-fp32
  --attention-backend flash
)

PATHS=$REPO:$SLIME_PATH:$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}
RUNTIME_ENV_JSON="{\"env_vars\": {\"PYTHONPATH\": \"$PATHS\",
  \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\",
  \"TENSORBOARD_DIR\": \"$RUN_DIR/tensorboard\"}}"

# A Ray head on this machine; delete this line if one is running.
ray start --head --num-gpus=8 --dashboard-port=8265 --disable-usage-stats
ray job submit --address=http://127.0.0.1:8265 \
  --runtime-env-json="$RUNTIME_ENV_JSON" \
  -- python3 "$SLIME_PATH/train.py" \
  "${LAYOUT_ARGS[@]}" \
  "${MODEL_ARGS[@]}" \
  "${CKPT_ARGS[@]}" \
  "${HOOK_ARGS[@]}" \
  "${ROLLOUT_ARGS[@]}" \
  "${EVAL_ARGS[@]}" \
  "${PPO_ARGS[@]}" \
  "${OPTIMIZER_ARGS[@]}" \
  "${PERF_ARGS[@]}" \
  "${SGLANG_ARGS[@]}" \
  "${TRACKING_ARGS[@]}" \
  "${MISC_ARGS[@]}"
