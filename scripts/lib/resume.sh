# Finds the step from which a stopped run continues: the last that all its parts have saved. Sourced by slime.sh.

# The step that Megatron names in a role's folder once it is saved completely; -1 if there is none.
last_step() {
  cat "$1/latest_checkpointed_iteration.txt" 2> /dev/null || echo -1
}

has_step() {
  [ "$2" -le "$(last_step "$1")" ] && [ -d "$1/$(printf 'iter_%07d' "$2")" ]
}

# The last step that all parts of the run have saved: critic, rollout state, and the actor, which slime does not save
# while only the critic trains. -1 if there is none.
common_step() {
  local state step last=-1
  for state in "$ACTOR_DIR"/rollout/slime_verlog_*.safetensors; do
    step=${state##*_} step=${step%.safetensors}
    [[ $step =~ ^[0-9]+$ ]] && [ "$step" -gt "$last" ] && has_step "$CRITIC_DIR" "$step" || continue
    [ "$step" -lt "$CRITIC_ONLY_STEPS" ] || has_step "$ACTOR_DIR" "$step" || continue
    last=$step
  done
  echo "$last"
}

# The folder from which a role loads a step: its own, or, if it has a later step too, one that shows this step alone.
# --ckpt-step would not do: slime takes 0 for absent, and loads the reference at that step as well.
folder_at() {
  local view=$RUN_DIR/resume/${1##*/} step
  step=$(printf 'iter_%07d' "$2")
  if [ "$(last_step "$1")" -eq "$2" ]; then
    echo "$1"
    return
  fi
  mkdir -p "$view"
  ln -sfn "../../${1##*/}/$step" "$view/$step"
  echo "$2" > "$view/latest_checkpointed_iteration.txt"
  echo "$view"
}

# One sentence if a part of the run has to go back to an earlier step, or to the beginning.
note_lost_steps() {
  local saved="last of the actor: ${2/#-1/none}, of the critic: ${3/#-1/none}"
  if [ "$1" -lt 0 ]; then
    echo "note: no step was saved completely ($saved), so the run starts from the beginning" >&2
  elif [ "$2" -gt "$1" ] || [ "$3" -gt "$1" ]; then
    echo "note: step $1 is the last that was saved completely ($saved), so the run continues after it" >&2
  fi
}

# The checkpoints that actor and critic load: those of the last common step, or the weights that a new run starts from.
resume_arguments() {
  local step actor critic actor_load=$ACTOR_DIR critic_load=${PRETRAINED_CRITIC:-$REFERENCE} resumed=
  step=$(common_step) actor=$(last_step "$ACTOR_DIR") critic=$(last_step "$CRITIC_DIR")
  RESUME_ARGS=()
  [ "$step" -lt 0 ] || critic_load=$(folder_at "$CRITIC_DIR" "$step")
  if [ "$step" -ge "$CRITIC_ONLY_STEPS" ]; then
    actor_load=$(folder_at "$ACTOR_DIR" "$step")
  elif [ "$actor" -ge 0 ] || [ "$critic" -ge 0 ]; then
    # slime takes a run without an actor's checkpoint for a fresh one: it would drop the critic's optimizer, and v0.3.1
    # begins at rollout 0 whatever it is told. So the actor's load is the reference, as slime would set it.
    RESUME_ARGS=(--start-rollout-id $((step + 1)) --finetune --no-load-optim --no-load-rng)
    actor_load=$REFERENCE
    [ "$step" -lt 0 ] || resumed=", finetune: false, no_load_optim: false, no_load_rng: false"
  fi
  [ "$actor$critic" = -1-1 ] || note_lost_steps "$step" "$actor" "$critic"
  ROLES_FILE=$RUN_DIR/roles.yaml
  local quote="'"
  ROLES_TEXT="megatron:
  - {name: default, role: critic, overrides: {lr: ${CRITIC_LR:-1.0e-5}, load: '${critic_load//$quote/$quote$quote}', save: '${CRITIC_DIR//$quote/$quote$quote}'$resumed}}"
  [ -n "$FLAT" ] || printf '%s\n' "$ROLES_TEXT" > "$ROLES_FILE"
  CKPT_ARGS=(
    --hf-checkpoint "$HF_CHECKPOINT"
    --ref-load "$REFERENCE"
    --load "$actor_load"
    --save "$ACTOR_DIR"
    --save-interval 20
    --megatron-config-path "$ROLES_FILE"
    "${RESUME_ARGS[@]}"
  )
}
