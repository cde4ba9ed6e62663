#!/usr/bin/env bash
# Installs the project into .venv, then trains a tiny policy on BabyAI and shows what it learned, all on the CPU:
#   bash scripts/run_quickstart.sh                    seed 0, into outputs/quickstart/
#   bash scripts/run_quickstart.sh --seeds 0 1 2      three seeds and their table
#   bash scripts/run_quickstart.sh --config custom_configs/my.yaml --updates 40 --out outputs/mine
# Options: --seed or --seeds, --config YAML, --updates N, --episodes N, --out FOLDER, --model MODEL, --demonstrations N,
# --set KEY=VALUE, --set-flag NAME=VALUE (docs/studies.md). CONFIG=, UPDATES= and TURNS= work as well. The
# same command again continues a stopped run. It ends with the commands that evaluate and show the trained policy.
cd "$(dirname "$0")/.."
source scripts/lib/help.sh
source scripts/install.sh
install envs,embedded
exec "$VENV/bin/python" -m embedded.quickstart ${OPTIONS[@]+"${OPTIONS[@]}"} "$@"
