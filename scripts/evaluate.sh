#!/usr/bin/env bash
# Plays the held-out episodes of a YAML and writes a table with standard errors:
#   bash scripts/evaluate.sh custom_configs/babyai.yaml random
#   bash scripts/evaluate.sh custom_configs/babyai.yaml expert
#   bash scripts/evaluate.sh custom_configs/babyai.yaml MODEL_FOLDER --sweep memory.n=1,2,4
#   bash scripts/evaluate.sh custom_configs/babyai.yaml MODEL_FOLDER --engine http://HOST:PORT
#   bash scripts/evaluate.sh custom_configs/babyai.yaml https://HOST/v1 --model NAME
# SGLang serves a model's folder where it is installed (TP sets its GPUs, default 1); elsewhere the embedded engine does,
# on the CPU, for small models. --engine names an SGLang server that already serves the model. Other options are those
# of `slime-verlog evaluate`: --out FOLDER, --episodes N, --repeats N, --set KEY=VALUE, --sweep KEY=V1,V2,
# --allow-failures N, --tokenizer FOLDER, --model NAME, --api-key-env NAME, --temperature, --max-response-len,
# --max-context-len, --seed.
cd "$(dirname "$0")/.."
source scripts/lib/help.sh
[ $# -ge 2 ] || { print_header >&2; exit 2; }
config=$1 player=$2
shift 2
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

engine= options=() python=python3
while [ $# -gt 0 ]; do
  case $1 in
    --engine) engine=${2:?--engine needs an address}; shift ;;
    --engine=*) engine=${1#*=} ;;
    *) options+=("$1") ;;
  esac
  shift
done

if python3 -c 'import sglang' > /dev/null 2>&1; then
  if [ -z "$engine" ] && [ -d "$player" ]; then
    port=${PORT:-30000}
    python3 -m sglang.launch_server --model-path "$player" --tp-size "${TP:-1}" --port "$port" &
    server=$!
    trap 'kill $server' EXIT
    until curl -sf "http://127.0.0.1:$port/health" > /dev/null; do
      sleep 2
      kill -0 $server 2> /dev/null || { echo "error: the SGLang server ended before it served" >&2; exit 1; }
    done
    engine=http://127.0.0.1:$port
  fi
else
  source scripts/install.sh
  install envs,embedded
  python=$VENV/bin/python
fi
if [ -n "$engine" ]; then
  options=(--tokenizer "$player" --model "$(basename "$player")" ${options[@]+"${options[@]}"})
  player=$engine
fi
"$python" -m inspection evaluate "$config" --player "$player" ${options[@]+"${options[@]}"}
