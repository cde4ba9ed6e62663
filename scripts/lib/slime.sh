# The common part of the scripts that train on a slime cluster; sourced by run_*.sh, which set what differs.
#
# A script sets CONFIG MODEL NUM_GPUS TURNS STEP_TURNS PROMPT_LEN RESPONSE_LEN UPDATES, each as NAME=${NAME:-default}, so
# that the environment overrides it, and calls
#   parse_options "$@"; build_arguments; submit
# It may append to any *_ARGS array, and NAME=VALUE to JOB_ENV, in between; later flags win. EXPERIMENT names the run's
# folder; it is the YAML's name unless set. Environment variables override the paths below. Beside this file, resume.sh finds the step that a run continues from, job.sh prints the job,
# checks it and hands it to Ray, and flat.sh prints it as one file.
source "$(dirname "${BASH_SOURCE[0]}")/help.sh"
source "$(dirname "${BASH_SOURCE[0]}")/job.sh"
source "$(dirname "${BASH_SOURCE[0]}")/flat.sh"
source "$(dirname "${BASH_SOURCE[0]}")/resume.sh"

SLIME_PATH=${SLIME_PATH:-/root/slime}             # the checkout whose train.py runs
MEGATRON_PATH=${MEGATRON_PATH:-/root/Megatron-LM}
MODELS=${MODELS:-/root/models}                    # scripts/prepare_model.sh puts checkpoints here
OUTPUT=${OUTPUT:-/root/runs}                      # one folder per experiment: checkpoints, YAML files, TensorBoard
RAY_ADDRESS=${RAY_ADDRESS:-http://127.0.0.1:8265}
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

LAYOUT=colocated
TRAIN_SCRIPT=${TRAIN_SCRIPT:-train.py}            # or train_async.py (docs/asynchronous.md)
DRY_RUN= FLAT=
NUM_NODES=${NUM_NODES:-1}
CHECKPOINTS_KEPT=${CHECKPOINTS_KEPT:-2}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-1}
ENGINE_GPUS=${ENGINE_GPUS:-1}
EXTRA_ARGS=() JOB_ENV=()
IMAGES=                                   # vision.sh sets it to the option of prepare_model.sh
PRETRAINING=${PRETRAINING:-}              # set by run_value_pretraining.sh
CRITIC_ONLY=${CRITIC_ONLY:-0}             # batches that train the critic alone, beside those of the YAML's warm-up
PRETRAINED_CRITIC=${PRETRAINED_CRITIC:-}  # the critic that it saved; PPO starts from it, without a warm-up

usage() {
  cat << END
$(print_header)

usage: bash scripts/$(basename "$0") [--dry-run | --flat] [--model NAME] [--disaggregated] [-- SLIME FLAGS]
  --dry-run        write the YAML files into the run's folder, print the job as a script, start nothing
  --flat           print the run as one script in the style of slime's examples; write and start nothing
  --model NAME     $(models_that_fit) (now $MODEL)
  --disaggregated  separate GPUs for training and serving; without it they take turns on the same ones
  -- FLAGS         further flags for slime's train.py; they override the script's
environment variables, with their current values:
  CONFIG=${CONFIG:-}    the YAML: environment, memory, warm-up; it also names the run's folder
$(usage_of_batches)
  NUM_GPUS=$NUM_GPUS, NUM_NODES=$NUM_NODES, TENSOR_PARALLEL=$TENSOR_PARALLEL    GPUs per node, nodes, GPUs that share a layer
  ROLLOUT_GPUS=${ROLLOUT_GPUS:-half of them}    GPUs per node that serve, with --disaggregated; of several nodes, half serve
  TRAIN_SCRIPT=$TRAIN_SCRIPT    or train_async.py, which needs --disaggregated (docs/asynchronous.md)
  SLIME_PATH=$SLIME_PATH, MEGATRON_PATH=$MEGATRON_PATH, MODELS=$MODELS, OUTPUT=$OUTPUT
  RAY_ADDRESS=$RAY_ADDRESS    the job server of the Ray cluster, as an HTTP address
  CHECKPOINTS_KEPT=$CHECKPOINTS_KEPT    steps kept on disk; all: keep every step
  WANDB_PROJECT=${WANDB_PROJECT:-}    log to this Weights & Biases project instead of to TensorBoard
END
}

models_that_fit() {
  echo "Qwen2.5-3B-Instruct, Qwen2.5-7B-Instruct, Qwen3-4B, ...: any model in slime's scripts/models/"
}

# The variables that size a run; geo3k and supervised training have others.
usage_of_batches() {
  [ -n "${TURNS:-}" ] || return 0  # prepare_model.sh
  cat << END
  TURNS=$TURNS, STEP_TURNS=$STEP_TURNS    turns per batch and per training step
  UPDATES=$UPDATES    batches that train the actor, after the critic's warm-up
  PROMPT_LEN=$PROMPT_LEN, RESPONSE_LEN=$RESPONSE_LEN    longest prompt and response, in tokens
  PRETRAINED_CRITIC=$PRETRAINED_CRITIC    what run_value_pretraining.sh saved: the critic starts there, without warm-up
  EVAL_INTERVAL=${EVAL_INTERVAL:-}    batches between evaluations; unset: at most 5, the last after the last update
END
}

parse_options() {
  while [ $# -gt 0 ]; do
    case $1 in
      --dry-run) DRY_RUN=yes ;;
      --flat) DRY_RUN=yes FLAT=yes ;;
      --disaggregated) LAYOUT=disaggregated ;;
      --model) MODEL=${2:?--model needs a name}; shift ;;
      --help | -h) usage; exit 0 ;;
      --) shift; EXTRA_ARGS=("$@"); break ;;
      *) usage >&2; die "unknown option $1; slime's own flags come after --" ;;
    esac
    shift
  done
  EXPERIMENT=${EXPERIMENT:-$(basename "$CONFIG" .yaml)}
  [ -z "$PRETRAINING" ] || EXPERIMENT=critic-$EXPERIMENT
  RUN_DIR=$OUTPUT/$EXPERIMENT-$MODEL
  [ -z "$FLAT" ] || name_paths_by_variables
  HF_CHECKPOINT=$MODELS/$MODEL
  REFERENCE=${REFERENCE:-$MODELS/$MODEL${IMAGES:+_images}_torch_dist}  # what actor and critic start from, and KL measures
  ACTOR_DIR=$RUN_DIR/actor
  CRITIC_DIR=$RUN_DIR/critic
}

build_arguments() {
  write_config
  keep_checkpoints
  model_arguments
  resume_arguments
  hook_arguments
  batch_arguments
  ppo_arguments
  cluster_arguments
}

# Megatron's description of the model, from slime's own collection.
model_arguments() {
  local name=${MODEL/#Qwen/qwen} file
  MODEL_LINES=("source \"\$SLIME_PATH/scripts/models/${name%-Instruct}.sh\"")  # what --flat prints
  [ -z "$FLAT" ] || { MODEL_ARGS=(); return; }
  for file in "$SLIME_PATH/scripts/models/$name.sh" "$SLIME_PATH/scripts/models/${name%-Instruct}.sh"; do
    [ -f "$file" ] || continue
    # shellcheck source=/dev/null
    source "$file"
    return
  done
  [ -n "$DRY_RUN" ] || die "no $file; set SLIME_PATH to a slime checkout, or add the model there (docs/slime.md)"
  echo "note: $SLIME_PATH/scripts/models has no $MODEL, so the model's flags are missing below" >&2
  MODEL_ARGS=()
}

# The experiment's YAML as this run uses it. Hybrid Qwen3 models think by default, which no response length here fits;
# Instruct, Thinking, Coder and Next are not hybrids.
write_config() {
  local file=$CONFIG
  [[ $file == /* ]] || file=$REPO/$CONFIG
  [ -f "$file" ] || die "no CONFIG=$CONFIG; give a YAML file, as an absolute path or relative to $REPO"
  CONFIG_FILE=$RUN_DIR/config.yaml
  CONFIG_TEXT=$(< "$file")
  save_config
  if [[ $MODEL =~ ^Qwen3(\.[0-9]+)?-[0-9.]+B(-A[0-9.]+B)?(-FP8|-AWQ|-GPTQ-Int[48])?$ ]]; then
    add_key chat_template_kwargs '{enable_thinking: false}'
  fi
  [ -z "$PRETRAINING$PRETRAINED_CRITIC" ] || replace_warmup
  CRITIC_ONLY_STEPS=$((CRITIC_ONLY + $(config_number w_epoch) + $(config_number w_iter) + $(config_number batches)))
}

# Value pretraining, and a critic that comes from it, do without the warm-up.
replace_warmup() {
  local batches
  CRITIC_ONLY=0
  batches=$(config_number w_epoch)
  CONFIG_TEXT=$(awk '/^critic_warmup:/ { skip = 1; next } skip && /^[ \t]/ { next } { skip = 0; print }' <<< "$CONFIG_TEXT")
  if [ -n "$PRETRAINING" ]; then
    [ -z "$PRETRAINED_CRITIC" ] || die "value pretraining makes a critic; unset PRETRAINED_CRITIC, or run a PPO script"
    [ -n "${BATCHES:-}" ] || BATCHES=$((batches > 0 ? batches : 20))
    counts BATCHES
    UPDATES=0
    add_key value_pretraining "
  batches: $BATCHES
  held_out: ${HELD_OUT:-0.2}
  passes: ${PASSES:-50}
  patience: ${PATIENCE:-3}"
  fi
  save_config
}

save_config() {
  [ -n "$FLAT" ] || { mkdir -p "$RUN_DIR" && printf '%s\n' "$CONFIG_TEXT" > "$CONFIG_FILE"; } 2> /dev/null ||
    die "cannot write $CONFIG_FILE; set OUTPUT to a folder that you may write to, and that all nodes share"
}

# A key of the run's YAML, unless the experiment sets it.
add_key() {
  grep -q "^$1:" <<< "$CONFIG_TEXT" || CONFIG_TEXT+=$'\n'"$1: $2"
  save_config
}

# One save of actor and critic is tens to hundreds of gigabytes.
keep_checkpoints() {
  [ "$CHECKPOINTS_KEPT" = all ] || add_key checkpoints_kept "$CHECKPOINTS_KEPT"
}

config_number() {
  awk -v key="$1:" '$1 == key { print $2; found = 1; exit } END { if (!found) print 0 }' <<< "$CONFIG_TEXT"
}

hook_arguments() {
  HOOK_ARGS=(
    --custom-config-path "$CONFIG_FILE"
    --rollout-function-path rollout.fixed_turn.generate_rollout
    --data-source-path rollout.data_source.EpisodeSource
    --custom-convert-samples-to-train-data-path rollout.samples.convert_samples_to_train_data
    --custom-megatron-init-path advantage.patch.install
    --rollout-data-postprocess-path advantage.kl_split.log_kl_split
    --custom-rollout-log-function-path inspection.metrics.log_rollout
    --custom-eval-rollout-log-function-path inspection.metrics.log_eval_rollout
  )
}

# A batch is TURNS turns, whatever episodes they belong to; a training step takes STEP_TURNS of them.
batch_arguments() {
  counts TURNS STEP_TURNS PROMPT_LEN RESPONSE_LEN
  [ -n "$PRETRAINING" ] || counts UPDATES
  [ $((TURNS % STEP_TURNS)) -eq 0 ] || die "STEP_TURNS=$STEP_TURNS does not divide TURNS=$TURNS; change one of them"
  local rollouts=$((CRITIC_ONLY_STEPS + UPDATES))
  ROLLOUT_ARGS=(
    --num-rollout "$rollouts"
    --rollout-batch-size "$TURNS"
    --n-samples-per-prompt 1
    --global-batch-size "$STEP_TURNS"
    --rollout-max-prompt-len "$PROMPT_LEN"
    --rollout-max-response-len "$RESPONSE_LEN"
    --rollout-max-context-len $((PROMPT_LEN + RESPONSE_LEN))
    --rollout-temperature 1
    --balance-data
  )
  # slime wants a data set to be named wherever it evaluates; the held-out episodes are those of the YAML.
  EVAL_ARGS=(
    --eval-interval "${EVAL_INTERVAL:-$(spaced_evaluations "$rollouts")}"
    --skip-eval-before-train
    --eval-prompt-data held-out from-the-yaml
    --eval-top-k 1
  )
  [ -z "$PRETRAINING" ] || EVAL_ARGS=()  # the policy does not change
}

# The batches between evaluations. slime evaluates after every N-th batch, and not after the last unless N divides their
# number. Before the actor trains, there is nothing to measure. So: the smallest divisor above the warm-up that gives at
# most 5 evaluations. All GPUs but those that serve a few games wait meanwhile (docs/slime.md, "Time").
spaced_evaluations() {
  local interval
  for ((interval = CRITIC_ONLY_STEPS + 1; interval < $1; interval++)); do
    [ $(($1 % interval)) -ne 0 ] || [ $(($1 / interval)) -gt 5 ] || break
  done
  echo "$interval"
}

ppo_arguments() {
  PPO_ARGS=(
    --advantage-estimator ppo
    --num-critic-only-steps "$CRITIC_ONLY_STEPS"
    --normalize-advantages
    --kl-coef 0.001
    --kl-loss-type k1
    --entropy-coef 0.001
    --eps-clip 0.2
    --eps-clip-c 3.0
    --value-clip 0.5
    --calculate-per-token-loss
  )
  OPTIMIZER_ARGS=(
    --optimizer adam
    --lr "${ACTOR_LR:-1e-6}"
    --lr-decay-style constant
    --weight-decay 0.01
    --adam-beta1 0.9
    --adam-beta2 0.999
    --clip-grad 1.0
  )
}

# Each of these variables must count something.
counts() {
  local name
  for name in "$@"; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name} must be a whole number of at least 1"
  done
}

divides() {
  [ $(($3 % $2)) -eq 0 ] || die "$1 does not divide the $3 $4; change it, or the number of GPUs"
}

cluster_arguments() {
  counts NUM_GPUS NUM_NODES TENSOR_PARALLEL ENGINE_GPUS
  local actor_nodes=$NUM_NODES actor_gpus=$NUM_GPUS serving=$((NUM_GPUS * NUM_NODES)) offset=0
  if [ $LAYOUT = disaggregated ] && [ -z "${ROLLOUT_GPUS:-}" ] && [ "$NUM_NODES" -gt 1 ]; then
    actor_nodes=$((NUM_NODES - NUM_NODES / 2))  # whole nodes, the last of which serve
    serving=$((NUM_GPUS * (NUM_NODES / 2)))
    LAYOUT_ARGS=(--rollout-num-gpus "$serving")
  elif [ $LAYOUT = disaggregated ]; then
    ROLLOUT_GPUS=${ROLLOUT_GPUS:-$((NUM_GPUS / 2))}
    actor_gpus=$((NUM_GPUS - ROLLOUT_GPUS))
    counts ROLLOUT_GPUS
    [ "$actor_gpus" -gt 0 ] || die "ROLLOUT_GPUS=$ROLLOUT_GPUS leaves none of NUM_GPUS=$NUM_GPUS for training"
    serving=$((ROLLOUT_GPUS * NUM_NODES))
    offset=$((actor_gpus * NUM_NODES % NUM_GPUS))  # where serving starts inside a node
    LAYOUT_ARGS=(--rollout-num-gpus "$serving")
  else
    LAYOUT_ARGS=(--colocate)
  fi
  divides "TENSOR_PARALLEL=$TENSOR_PARALLEL" "$TENSOR_PARALLEL" $((actor_gpus * actor_nodes)) "GPUs that train"
  divides "ENGINE_GPUS=$ENGINE_GPUS" "$ENGINE_GPUS" "$serving" "GPUs that serve"
  if [ "$serving" -gt $((NUM_GPUS - offset)) ]; then  # slime counts NUM_GPUS GPUs from the first engine as one host
    [ "$offset" -eq 0 ] || die "with ROLLOUT_GPUS=$ROLLOUT_GPUS and NUM_NODES=$NUM_NODES, serving starts inside a node" \
      "and goes on in the next, whose engines slime would look for on the first: leave ROLLOUT_GPUS out, or lower it" \
      "until ROLLOUT_GPUS x NUM_NODES is at most NUM_GPUS=$NUM_GPUS or a multiple of it"
    [ $((NUM_GPUS % ENGINE_GPUS)) -eq 0 ] || [ $((ENGINE_GPUS % NUM_GPUS)) -eq 0 ] ||
      die "ENGINE_GPUS=$ENGINE_GPUS must divide NUM_GPUS=$NUM_GPUS or be a multiple of it; an engine would be on two nodes"
  fi
  LAYOUT_ARGS+=(
    --actor-num-nodes "$actor_nodes"
    --actor-num-gpus-per-node "$actor_gpus"
    --num-gpus-per-node "$NUM_GPUS"
  )
  PERF_ARGS=(
    --tensor-model-parallel-size "$TENSOR_PARALLEL"
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu "${MAX_TOKENS_PER_GPU:-$((4 * (PROMPT_LEN + RESPONSE_LEN)))}"
  )
  [ "$TENSOR_PARALLEL" -eq 1 ] || PERF_ARGS+=(--sequence-parallel)
  SGLANG_ARGS=(
    --rollout-num-gpus-per-engine "$ENGINE_GPUS"
    --sglang-mem-fraction-static "${MEM_FRACTION:-0.55}"
  )
  MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
  )
  # TENSORBOARD_DIR of the job's environment wins over these names, which whoever copies the flags without it needs.
  TRACKING_ARGS=(--use-tensorboard --tb-project-name slime-verlog --tb-experiment-name "$EXPERIMENT-$MODEL")
  if [ -n "${WANDB_PROJECT:-}" ]; then
    TRACKING_ARGS=(--use-wandb --wandb-project "$WANDB_PROJECT" --wandb-group "$EXPERIMENT-$MODEL")
  fi
}
