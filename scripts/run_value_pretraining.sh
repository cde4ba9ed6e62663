#!/usr/bin/env bash
# Value pretraining on a slime cluster: collects turns with the frozen policy, trains the critic on them until held-out
# explained variance stops rising, and saves it for any number of PPO runs. Takes its settings from a PPO script.
#   bash scripts/run_value_pretraining.sh                  for run_babyai.sh; --help lists the options
#   RUN=crafter BATCHES=20 bash scripts/run_value_pretraining.sh
# PPO then starts from what it saved, without the critic's warm-up:
#   PRETRAINED_CRITIC=/root/runs/critic-babyai-Qwen2.5-3B-Instruct/critic bash scripts/run_babyai.sh
# RUN=babyai names the PPO script. BATCHES is how many batches are played: unless set, as many as its warm-up collects.
# HELD_OUT=0.2 is the share of held-out turns, PASSES=50 the most passes, PATIENCE=3 how many without a gain end it.
die() { echo "error: $*" >&2; exit 2; }
cd "$(dirname "$0")/.."
SCRIPT=scripts/run_${RUN:=babyai}.sh
[ -z "${UPDATES:-}" ] ||
  die "UPDATES=$UPDATES has no meaning here: the policy does not train; BATCHES is how many batches are played"
grep -qsE 'scripts\.launch(er\.sao)? ' "$SCRIPT" ||
  die "RUN=$RUN, but there is no $SCRIPT that trains a critic; RUN=babyai means scripts/run_babyai.sh"
PRETRAINING=$0 exec bash "$SCRIPT" "$@"
