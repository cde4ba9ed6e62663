# Makes .venv with Python 3.11 or 3.12 and installs the project into it; sourced by the run_*.sh scripts.
# Usage: install EXTRA[,EXTRA...]. VENV names another folder; an environment that is already complete is kept.

VENV=${VENV:-.venv}

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3 python; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
      > /dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.11 or 3.12 is needed and was not found; install one or set PYTHON to it." >&2
  return 1
}

install() {
  local extras=$1 python stamp
  # Of the same pyproject.toml and the same extras only one installation is needed.
  stamp="$VENV/.installed-$(echo "$extras" | cat - pyproject.toml | cksum | cut -d' ' -f1)"
  [ -e "$stamp" ] && return
  python=$(find_python) || return 1
  [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
  # torch first and by exact version, so that no other package chooses the build. An ordinary index gives the CUDA
  # build (gigabytes); where you have an index of CPU builds, name it in PIP_EXTRA_INDEX_URL.
  "$VENV/bin/python" -m pip install -q --disable-pip-version-check "torch==2.13.0"
  "$VENV/bin/python" -m pip install -q --disable-pip-version-check -e ".[$extras]"
  touch "$stamp"
}
