# Models that see, for run_geo3k_vlm.sh, run_crafter_vlm.sh and prepare_model.sh --images; sourced after slime.sh.
#
# slime main and v0.3.1 train with pictures only Qwen3.5. They describe one mixture with pictures, in qwen3.5-35B-A3B-vl.sh.
# For a dense size, this takes the file of the text model and names slime's model provider for pictures instead of the
# text model's layers, as that file does.
DENSE_VISION_MODELS="Qwen3.5-0.8B Qwen3.5-4B Qwen3.5-9B Qwen3.5-27B"
IMAGES=" --images"
PROVIDER="MODEL_ARGS[1]=slime_plugins.models.qwen3_5_vl MODEL_ARGS[2]=get_qwen3_5_vl_model_provider"

models_that_fit() {
  echo "${DENSE_VISION_MODELS// /, }, Qwen3.5-35B-A3B: those that slime trains with pictures"
}

model_arguments() {
  local line file=${MODEL/#Qwen/qwen}
  if [ "$MODEL" = Qwen3.5-35B-A3B ] || [ -f "$SLIME_PATH/scripts/models/$file-vl.sh" ]; then
    MODEL_LINES=("source \"\$SLIME_PATH/scripts/models/$file-vl.sh\"")
  elif [[ " $DENSE_VISION_MODELS " == *" $MODEL "* ]]; then
    MODEL_LINES=(
      "source \"\$SLIME_PATH/scripts/models/$file.sh\"  # the text model; the next line adds slime's pictures"
      "$PROVIDER"
    )
  else
    die "slime has no description of $MODEL with pictures; name a model that slime trains with pictures:" \
      "$DENSE_VISION_MODELS Qwen3.5-35B-A3B"
  fi
  MODEL_ARGS=()
  [ -z "$FLAT" ] || return 0
  if [ ! -d "$SLIME_PATH/scripts/models" ]; then
    [ -n "$DRY_RUN" ] || die "no $SLIME_PATH/scripts/models; set SLIME_PATH to a slime checkout"
    echo "note: there is no $SLIME_PATH/scripts/models, so the model's flags are missing below" >&2
    return 0
  fi
  for line in "${MODEL_LINES[@]}"; do
    eval "$line"
  done
  [ "${MODEL_ARGS[0]}" = --spec ] || die "slime's description of $MODEL does not begin with --spec; name another model"
}
