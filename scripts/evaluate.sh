#!/usr/bin/env bash
# Plays the held-out episodes of a YAML and prints a table with standard errors:
#   bash scripts/evaluate.sh custom_configs/babyai.yaml MODEL_FOLDER
#   bash scripts/evaluate.sh custom_configs/babyai.yaml MODEL_FOLDER --engine http://HOST:PORT
#   bash scripts/evaluate.sh custom_configs/babyai.yaml MODEL_FOLDER --sweep memory.n=1,2,4
# SGLang serves the model where it is installed (TP GPUs of it, 1 unless given); elsewhere the embedded engine does, on
# the CPU, for small models. Further options: --set KEY=VALUE, --sweep KEY=V1,V2, --temperature, --max-response-len,
# --max-context-len, --seed, --out FOLDER.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/help.sh
help_if_asked "$@"
[ $# -ge 2 ] || { print_header >&2; exit 2; }
config=$1 checkpoint=$2
shift 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

python=python3
engine=()
case " $* " in *" --engine "*) given=yes ;; *) given= ;; esac
if python3 -c 'import sglang' > /dev/null 2>&1; then
  if [ -z "$given" ]; then
    port=${PORT:-30000}
    python3 -m sglang.launch_server --model-path "$checkpoint" --tp-size "${TP:-1}" --port "$port" &
    server=$!
    trap 'kill $server' EXIT
    until curl -sf "http://127.0.0.1:$port/health" > /dev/null; do
      sleep 2
      kill -0 $server 2> /dev/null || { echo "error: the SGLang server ended before it served" >&2; exit 1; }
    done
    engine=(--engine "http://127.0.0.1:$port")
  fi
else
  source scripts/install.sh
  install envs,embedded
  python=$VENV/bin/python
fi
"$python" -m inspection.evaluate --config "$config" --checkpoint "$checkpoint" "${engine[@]}" "$@"
