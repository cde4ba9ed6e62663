# Sourced first by the scripts, so that --help answers before anything is installed.

die() {
  echo "error: $*" >&2
  exit 2
}

# The comment at the head of the script that runs.
print_header() {
  sed -n '2,${/^#/!q;s/^# \{0,1\}//p}' "scripts/$(basename "$0")"
}

# Prints it and ends the script if one of the arguments asks for help.
help_if_asked() {
  local word
  for word in "$@"; do
    case $word in
      --) return 0 ;;
      --help | -h) print_header; exit 0 ;;
    esac
  done
}

# refuse_variables REASON NAME...: variables of the other scripts that this one cannot obey.
refuse_variables() {
  local name
  for name in "${@:2}"; do
    [ -z "${!name:-}" ] || die "$name=${!name} has no meaning here: $1"
  done
}

# OPTIONS: CONFIG, UPDATES and TURNS as options of the programs on one machine. Options on the command line come later, and
# win.
options_of_environment() {
  OPTIONS=()
  [ -z "${CONFIG:-}" ] || OPTIONS+=("--config=$CONFIG")
  [ -z "${UPDATES:-}" ] || OPTIONS+=("--updates=$UPDATES")
  [ -z "${TURNS:-}" ] || OPTIONS+=("--set-flag=rollout_batch_size=$TURNS")
}
