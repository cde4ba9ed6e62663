#!/usr/bin/env bash
# Makes .venv with Python 3.11 or 3.12 and installs the project into it:
#   bash scripts/install.sh                       for the environments and for training on this machine
#   bash scripts/install.sh envs,text-games       with these extras of pyproject.toml instead
# VENV names another folder and PYTHON the interpreter. A complete installation is kept.

# Other scripts source this file and call: install EXTRA[,EXTRA...], try_install EXTRA.
VENV=${VENV:-.venv}
unset PYTHONDONTWRITEBYTECODE  # a Python that may not keep compiled modules would compile torch in each process

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.12 python3 python; do
    [ -n "$candidate" ] && "$candidate" -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))" \
      > /dev/null 2>&1 && { echo "$candidate"; return; }
  done
  echo "Python 3.11 or 3.12 is needed and was not found; install one or set PYTHON to it." >&2
  return 1
}

# Of the same pyproject.toml and the same extras only one installation is needed.
stamp_of() {
  echo "$VENV/.installed-$(echo "$1" | cat - pyproject.toml | cksum | cut -d' ' -f1)"
}

pip_install() {
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile "$@"
}

make_venv() {
  local python
  [ -x "$VENV/bin/python" ] || { python=$(find_python) && "$python" -m venv "$VENV"; }
}

# What scripts/launch.py imports, without torch; a later install adds the rest.
install_launcher() {
  echo "installing pydantic and PyYAML into $VENV, because python3 lacks them"
  make_venv && pip_install -q "pydantic>=2.7" "pyyaml>=6"
}

install() {
  local stamp
  stamp=$(stamp_of "$1")
  [ -e "$stamp" ] && return
  make_venv || return 1
  # --no-compile: Python compiles the modules that are imported, a small part of all, on first use.
  # torch first and by exact version, so that no other package chooses the build. An ordinary index gives the CUDA
  # build (gigabytes); where you have an index of CPU builds, name it in PIP_EXTRA_INDEX_URL.
  echo "installing torch and the extras $1 into $VENV; the first time, this takes minutes"
  pip_install "torch==2.13.0"
  pip_install -e ".[$1]"
  touch "$stamp"
}

# For extras with packages that are compiled on the way: where that fails, what needs them is skipped and says so.
try_install() {
  local stamp
  stamp=$(stamp_of "$1")
  [ -e "$stamp" ] && return
  echo "installing the extra $1 into $VENV"
  pip_install -e ".[$1]" && touch "$stamp" ||
    echo "The extra '$1' could not be installed here (it needs make and a C compiler); going on without it." >&2
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  cd "$(dirname "$0")/.."
  source scripts/lib/help.sh
  install "${1:-envs,embedded}"
  echo "installed; now run: source $VENV/bin/activate"
fi
