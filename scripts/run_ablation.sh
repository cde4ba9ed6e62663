#!/usr/bin/env bash
# Runs an ablation study (one question, several settings, at least three seeds) on this machine, without a GPU:
#   bash scripts/run_ablation.sh dual_discount            into outputs/ablations/dual_discount/
#   bash scripts/run_ablation.sh memory --seeds 0 1 2 3 4 --updates 90
#   bash scripts/run_ablation.sh my_study.yaml   a study of your own (docs/studies.md)
# One run per core at a time; --jobs N runs N at a time.
# Studies: the files in embedded/studies/definitions; --list prints their questions (docs/algorithms.md).
# The same command also resumes: it skips finished runs and continues an interrupted one.
# Options: --seeds, --variants NAME..., --updates N, --eval-episodes N, --eval-interval N, --config YAML, --out FOLDER,
# --jobs N, --keep-policies, --list, --dry-run.
cd "$(dirname "$0")/.."
source scripts/lib/help.sh
[ -z "${TURNS:-}" ] ||
  { echo "error: TURNS=$TURNS has no meaning here: a study's flags stand in its YAML file (docs/studies.md)" >&2; exit 2; }
source scripts/install.sh
install envs,embedded,studies
exec "$VENV/bin/python" -m embedded.studies.run ${OPTIONS[@]+"${OPTIONS[@]}"} "$@"
