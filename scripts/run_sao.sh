#!/usr/bin/env bash
# Crafter with SAO (single-rollout asynchronous optimisation), on a slime cluster: 8 GPUs unless NUM_GPUS says otherwise.
# Half of them serve and keep playing while the others train, up to max_staleness. docs/asynchronous.md explains the
# settings that differ from run_crafter.sh, and which of them the paper leaves open.
#   bash scripts/prepare_model.sh Qwen2.5-7B-Instruct
#   bash scripts/run_sao.sh               --help lists the options; run it again to resume
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -n "${CONFIG:-}" ] || EXPERIMENT=${EXPERIMENT:-sao}
CONFIG=${CONFIG:-custom_configs/crafter_sao.yaml}
MODEL=${MODEL:-Qwen2.5-7B-Instruct}
NUM_GPUS=${NUM_GPUS:-8}
TENSOR_PARALLEL=${TENSOR_PARALLEL:-2}
MEM_FRACTION=${MEM_FRACTION:-0.75}
CRITIC_LR=${CRITIC_LR:-5.0e-6}
TURNS=${TURNS:-2048} STEP_TURNS=${STEP_TURNS:-1024}   # turns per batch, turns per training step
PROMPT_LEN=${PROMPT_LEN:-4096} RESPONSE_LEN=${RESPONSE_LEN:-512}
UPDATES=${UPDATES:-280}          # after the critic's
CRITIC_ONLY=${CRITIC_ONLY:-10}       # batches that train the critic alone, unless it is a pretrained one

source scripts/lib/slime.sh
LAYOUT=disaggregated
parse_options "$@"
build_arguments
HOOK_ARGS=("${HOOK_ARGS[@]/#rollout.fixed_turn.generate_rollout/rollout.continuous.generate_rollout}")
# No KL, no entropy bonus; the interval of ratios is the paper's for mathematics and tools, 0.8 and 3.0 are for coding.
PPO_ARGS=(
  --advantage-estimator ppo
  --num-critic-only-steps "$CRITIC_ONLY_STEPS"
  --normalize-advantages
  --kl-coef 0
  --entropy-coef 0
  --use-rollout-logprobs
  --eps-clip 0.3
  --eps-clip-high 5.0
  --value-clip 0.5
  --calculate-per-token-loss
)
submit
