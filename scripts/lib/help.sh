# Sourced first by the scripts of programs on one machine.
set -euo pipefail
# One thread each for engine, actor and critic: more of them would only wait for each other.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false

print_header() {  # the comment at the head of the script that runs
  sed -n '2,${/^#/!q;s/^# \{0,1\}//p}' "scripts/$(basename "$0")"
}
# --help answers before anything is installed.
for word in "$@"; do
  case $word in
    --) break ;;
    --help | -h) print_header; exit 0 ;;
  esac
done
# CONFIG, UPDATES and TURNS as options of the programs on one machine. Options on the command line come later, and win.
OPTIONS=(${CONFIG:+"--config=$CONFIG"} ${UPDATES:+"--updates=$UPDATES"} ${TURNS:+"--set-flag=rollout_batch_size=$TURNS"})
