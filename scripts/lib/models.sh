# Downloads that resume where they were interrupted; sourced by the scripts that need models or data sets.

# Runs a command, or prints it with --dry-run.
run() {
  printf '%q ' "$@"
  echo
  [ -n "$DRY_RUN" ] || "$@"
}

# Whether a download into this folder was interrupted: hf keeps what it has of a file beside the folder's files.
was_interrupted() {
  [ -n "$(find "$1/.cache" -name '*.incomplete' -print -quit 2> /dev/null)" ]
}

# Whether a Hugging Face folder has its configuration, its tokenizer and every file of weights.
model_is_complete() {
  local folder=$1 file
  [ -f "$folder/config.json" ] && [ -f "$folder/tokenizer_config.json" ] && ! was_interrupted "$folder" || return 1
  [ ! -f "$folder/model.safetensors" ] || return 0
  [ -f "$folder/model.safetensors.index.json" ] || return 1
  while read -r file; do
    [ -f "$folder/$file" ] || return 1
  done < <(grep -o '"[^"]*\.safetensors"' "$folder/model.safetensors.index.json" | tr -d '"' | sort -u)
}

download_model() {
  model_is_complete "$HF_CHECKPOINT" || run hf download "${HUB_OWNER:-Qwen}/$MODEL" --local-dir "$HF_CHECKPOINT"
}
