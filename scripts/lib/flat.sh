# The run as one file in the style of slime's examples, with both YAML files inside. Sourced by scripts/lib/slime.sh.

# Paths are printed as variables that the file sets at its top. No such folder exists, so the run counts as a new one.
name_paths_by_variables() {
  DEFAULT_PATHS="REPO=\${REPO:-\$PWD}  # the slime-verlog checkout
SLIME_PATH=\${SLIME_PATH:-$SLIME_PATH}  # the checkout whose train.py runs
MEGATRON_PATH=\${MEGATRON_PATH:-$MEGATRON_PATH}
MODELS=\${MODELS:-$MODELS}  # scripts/prepare_model.sh puts checkpoints here
OUTPUT=\${OUTPUT:-$OUTPUT}
RUN_DIR=\$OUTPUT/$EXPERIMENT-$MODEL"
  MODELS='$MODELS' RUN_DIR='$RUN_DIR'
  PREPARATION=
}

print_flat() {
  local group
  print_flat_head
  printf '\n%s\n' "${MODEL_LINES[@]}"
  for group in "${GROUPS_OF_FLAGS[@]}"; do
    local -n words=${group%% *}_ARGS
    [ ${#words[@]} -eq 0 ] || print_group "$group"
  done
  print_flat_end
}

# What the run is, from the head of its script.
print_flat_purpose() {
  print_header | sed -n '/^  /q;p' | tr '\n' ' ' |
    sed "s/[0-9]* GPUs unless NUM_GPUS says otherwise/$NUM_GPUS GPUs/;s/ *$/\n/" | fold -s -w 118 | sed 's/^/# /;s/ *$//'
}

print_flat_head() {
  local script
  script=scripts/$(basename "$0")
  cat << HEAD
#!/usr/bin/env bash
$(print_flat_purpose)
#
# Printed by: bash $script --flat
# It starts a new run, with the same flags as $script. That script also resumes a run, and it checks the
# flags before it uses a GPU.
set -euo pipefail

$DEFAULT_PATHS

[ -d "\$REPO/rollout" ] || { echo "error: \$REPO is not the slime-verlog checkout; set REPO" >&2; exit 2; }
[ ! -e "\$RUN_DIR/critic" ] && [ ! -e "\$RUN_DIR/actor" ] ||
  { echo "error: \$RUN_DIR holds a run; resume it with: bash $script" >&2; exit 2; }
mkdir -p "\$RUN_DIR"

cat > "\$RUN_DIR/config.yaml" << 'END'
$CONFIG_TEXT
END
HEAD
  # GRPO and supervised training have no critic, hence no file for its settings.
  [ -z "${ROLES_TEXT:-}" ] || printf '\ncat > "$RUN_DIR/roles.yaml" << END\n%s\nEND\n' "$ROLES_TEXT"
}

print_flat_end() {
  local group
  [ -z "$PREPARATION" ] || printf '\n%s\n' "$PREPARATION"
  printf '\nPATHS=$REPO:$SLIME_PATH:$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}\n'
  PATHS='$PATHS'
  set_job_environment
  printf 'RUNTIME_ENV_JSON="%s"\n\n' "$(runtime_environment $',\n  ' | sed 's/"/\\"/g')"
  [ "$NUM_NODES" -gt 1 ] || printf '# A Ray head on this machine; delete this line if one is running.\n%s\n' \
    "ray start --head --num-gpus=$NUM_GPUS --dashboard-port=8265 --disable-usage-stats"
  printf 'ray job submit --address=%s \\\n  --runtime-env-json="$RUNTIME_ENV_JSON" \\\n' "$RAY_ADDRESS"
  printf '  -- python3 "$SLIME_PATH/%s"' "$TRAIN_SCRIPT"
  for group in "${GROUPS_OF_FLAGS[@]}"; do
    local -n words=${group%% *}_ARGS
    [ ${#words[@]} -eq 0 ] && [ "${group%% *}" != MODEL ] || printf ' \\\n  "${%s_ARGS[@]}"' "${group%% *}"
  done
  printf '\n'
}
