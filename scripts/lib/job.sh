# The job that the *_ARGS arrays describe: printed, checked and handed to Ray. Sourced by scripts/lib/slime.sh.

# The groups in the order in which later flags win, and what each is for.
GROUPS_OF_FLAGS=(
  "LAYOUT      GPUs, and whether training and serving share them"
  "MODEL       the model's shape, from slime's scripts/models"
  "CKPT        weights: where they come from and where they are saved"
  "HOOK        what this project plugs into slime"
  "ROLLOUT     a batch: its turns, their lengths, sampling"
  "EVAL        held-out episodes"
  "PPO         advantages and losses"
  "OPTIMIZER   optimizer"
  "PERF        parallelism and memory of training"
  "SGLANG      serving"
  "TRACKING    where metrics go"
  "MISC        numerics"
  "EXTRA       from the command line, after --"
)

# Checks the whole command line first, so that a mistake costs seconds and no GPU; then hands it to Ray.
submit() {
  local group
  if [ -n "$FLAT" ]; then
    print_flat
    return
  fi
  TRAIN_ARGS=()
  for group in "${GROUPS_OF_FLAGS[@]}"; do
    local -n words=${group%% *}_ARGS
    TRAIN_ARGS+=("${words[@]}")
  done
  PATHS=$REPO:$SLIME_PATH:$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}
  set_job_environment
  JOB=(ray job submit "--address=$RAY_ADDRESS" "--runtime-env-json=$(runtime_environment ', ')")
  if [ -n "$DRY_RUN" ]; then
    print_job
    check_job_if_possible >&2
    return
  fi
  [ -f "$SLIME_PATH/$TRAIN_SCRIPT" ] || die "no $SLIME_PATH/$TRAIN_SCRIPT; set SLIME_PATH to a slime checkout"
  [ "$REFERENCE" = "$HF_CHECKPOINT" ] || [ -f "$REFERENCE/latest_checkpointed_iteration.txt" ] ||
    die "$REFERENCE holds no finished checkpoint; run: bash scripts/prepare_model.sh $MODEL$IMAGES"
  in_job_environment python3 -m rollout.preflight "$TRAIN_SCRIPT" "${TRAIN_ARGS[@]}"
  find_ray
  [[ " ${TRAIN_ARGS[*]} " != *" --use-tensorboard "* ]] ||
    echo "metrics: tensorboard --logdir $RUN_DIR/tensorboard --reload_multifile=true"
  "${JOB[@]}" -- python3 "$SLIME_PATH/$TRAIN_SCRIPT" "${TRAIN_ARGS[@]}"
}

# A dry run needs no slime; where there is one, and the model, it ends with preflight's verdict.
check_job_if_possible() {
  if [ -f "$HF_CHECKPOINT/config.json" ] && in_job_environment python3 -c 'import slime, megatron' 2> /dev/null; then
    in_job_environment python3 -m rollout.preflight "$TRAIN_SCRIPT" "${TRAIN_ARGS[@]}"
  else
    echo "note: the flags were not checked, which needs slime, Megatron and $HF_CHECKPOINT"
  fi
}

# What every process of the job inherits, as NAME=VALUE; a script may append to JOB_ENV. Preflight gets the same, because
# Megatron reads CUDA_DEVICE_MAX_CONNECTIONS while it checks flags. slime's writers take TENSORBOARD_DIR before any flag.
# slime's own launcher sets four more, which are not needed here. NCCL_NVLS_ENABLE: NCCL looks for NVLink itself.
# MASTER_ADDR: slime's training processes set it. PYTHONUNBUFFERED: Ray sets it for train.py, and runs workers with -u.
# no_proxy: it would replace that of the nodes, and they know each other's addresses (docs/troubleshooting.md).
set_job_environment() {
  JOB_ENV+=("PYTHONPATH=$PATHS" CUDA_DEVICE_MAX_CONNECTIONS=1 "TENSORBOARD_DIR=$RUN_DIR/tensorboard")
}

in_job_environment() {
  env "${JOB_ENV[@]}" "$@"
}

# The job's environment as Ray takes it; the argument goes between the variables.
runtime_environment() {
  local pair pairs=
  for pair in "${JOB_ENV[@]}"; do
    pairs+="${pairs:+$1}\"${pair%%=*}\": \"${pair#*=}\""
  done
  printf '{"env_vars": {%s}}' "$pairs"
}

# Prints a script that submits the same job, one flag per line. Only the run's folder was written to.
print_job() {
  local group
  printf '#!/usr/bin/env bash\n# What scripts/%s submits. Only %s was written so far.\n' "$(basename "$0")" "$RUN_DIR"
  for group in "${GROUPS_OF_FLAGS[@]}"; do
    print_group "$group"
  done
  printf '\n'
  printf 'ray job submit \\\n'
  printf '  %s \\\n' "$(quoted "${JOB[3]}")" "$(quoted "${JOB[4]}")"
  printf '  -- python3 %s' "$(quoted "$SLIME_PATH/$TRAIN_SCRIPT")"
  for group in "${GROUPS_OF_FLAGS[@]}"; do
    printf ' \\\n  "${%s_ARGS[@]}"' "${group%% *}"
  done
  printf '\n'
}

# One array: the comment that says what the group is for, then one flag per line.
print_group() {
  local -n flags=${1%% *}_ARGS
  printf '\n%s_ARGS=(  # %s' "${1%% *}" "$(sed 's/^[A-Z]* *//' <<< "$1")"
  print_flags "${flags[@]}"
  printf '\n)\n'
}

print_flags() {
  local word
  for word in "$@"; do
    case $word in
      --*) printf '\n  %s' "$word" ;;
      *) printf ' %s' "$(quoted "$word")" ;;
    esac
  done
}

# A word as the shell reads it back; quotes only where it needs them. Paths of --flat keep their variable.
quoted() {
  if [ -n "$FLAT" ] && [[ $1 =~ ^\$(RUN_DIR|MODELS|SLIME_PATH)(/[A-Za-z0-9_./-]*)?$ ]]; then
    printf '"%s"' "$1"
  elif [[ $1 =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then
    printf '%s' "$1"
  else
    printf "'%s'" "${1//\'/\'\\\'\'}"
  fi
}

# Asks the job server itself: `ray status` speaks another protocol and fails where RAY_ADDRESS is an HTTP address.
ray_answers() {
  curl --silent --fail --noproxy '*' --max-time 5 "$RAY_ADDRESS/api/version" 2> /dev/null | grep -q ray_version
}

# The cluster at RAY_ADDRESS; on one node, a head is started there if none runs.
find_ray() {
  local seconds
  [[ $RAY_ADDRESS =~ ^https?://([^/:]+):([0-9]+)/?$ ]] ||
    die "RAY_ADDRESS=$RAY_ADDRESS is not a job server's address; give it as http://HOST:8265"
  local host=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]}
  RAY_ADDRESS=${RAY_ADDRESS%/}
  ray_answers && return
  [ "$NUM_NODES" -eq 1 ] || die "NUM_NODES=$NUM_NODES, but no Ray job server answers at $RAY_ADDRESS; start a head and \
join the other nodes first (docs/slime.md, Several nodes)"
  [ "$host" = 127.0.0.1 ] || [ "$host" = localhost ] || die "no Ray job server answers at $RAY_ADDRESS; start one on \
that host with: ray start --head --dashboard-host=0.0.0.0 --dashboard-port=$port"
  env -u RAY_ADDRESS ray start --head "--num-gpus=$NUM_GPUS" "--dashboard-port=$port" --disable-usage-stats
  for seconds in $(seq "${RAY_WAIT:-60}"); do
    ray_answers && return
    sleep 1
  done
  die "Ray was started, but its job server does not answer at $RAY_ADDRESS; it needs pip install 'ray[default]'"
}
