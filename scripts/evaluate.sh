#!/usr/bin/env bash
# Plays the held-out episodes of a YAML and writes a table with standard errors:
#   bash scripts/evaluate.sh custom_configs/babyai.yaml random
#   bash scripts/evaluate.sh custom_configs/babyai.yaml MODEL_FOLDER --sweep memory.n=1,2,4
#   bash scripts/evaluate.sh custom_configs/babyai.yaml http://HOST:PORT --tokenizer MODEL_FOLDER
# The player and the options are those of `slime-verlog evaluate`. Where SGLang is installed, it serves a model's folder
# (TP sets its GPUs, default 1); elsewhere the embedded engine does, on the CPU, for small models.
cd "$(dirname "$0")/.."
source scripts/lib/help.sh
[ $# -ge 2 ] || { print_header >&2; exit 2; }
config=$1 player=$2
shift 2
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if ! python3 -c 'import sglang' > /dev/null 2>&1; then
  source scripts/install.sh
  install envs,embedded
  exec "$VENV/bin/python" -m inspection evaluate "$config" --player "$player" "$@"
fi
if [ -d "$player" ]; then
  port=${PORT:-30000}
  python3 -m sglang.launch_server --model-path "$player" --tp-size "${TP:-1}" --port "$port" &
  server=$!
  trap 'kill $server' EXIT
  until curl -sf "http://127.0.0.1:$port/health" > /dev/null; do
    sleep 2
    kill -0 $server 2> /dev/null || { echo "error: the SGLang server ended before it served" >&2; exit 1; }
  done
  set -- --tokenizer "$player" --model "$(basename "$player")" "$@"
  player=http://127.0.0.1:$port
fi
python3 -m inspection evaluate "$config" --player "$player" "$@"
