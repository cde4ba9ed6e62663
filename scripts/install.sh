#!/usr/bin/env bash
# Makes .venv with Python 3.11 or 3.12 and installs the project into it:
#   bash scripts/install.sh                       for the environments and for training on this machine
#   bash scripts/install.sh envs,text-games       with these extras of pyproject.toml instead
# VENV names another folder and PYTHON the interpreter. A complete installation is kept.

# Other scripts source this file and call: install EXTRA[,EXTRA...], try_install EXTRA.

VENV=${VENV:-.venv}

# Packages are installed without compiled modules (see below), and a Python that may not keep those that it compiles
# would compile torch again in each process.
unset PYTHONDONTWRITEBYTECODE

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

# Of the same pyproject.toml and the same extras only one installation is needed.
stamp_of() {
  echo "$VENV/.installed-$(echo "$1" | cat - pyproject.toml | cksum | cut -d' ' -f1)"
}

install() {
  local extras=$1 python stamp
  stamp=$(stamp_of "$extras")
  [ -e "$stamp" ] && return
  python=$(find_python) || return 1
  [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV"
  # --no-compile: Python compiles the modules that are imported, a small part of all, on first use.
  # torch first and by exact version, so that no other package chooses the build. An ordinary index gives the CUDA
  # build (gigabytes); where you have an index of CPU builds, name it in PIP_EXTRA_INDEX_URL.
  echo "installing torch and the extras $extras into $VENV; the first time, this takes minutes"
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile "torch==2.13.0"
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile -e ".[$extras]"
  touch "$stamp"
}

# For extras with packages that are compiled on the way: where that fails, what needs them is skipped and says so.
try_install() {
  local extra=$1 stamp
  stamp=$(stamp_of "$extra")
  [ -e "$stamp" ] && return
  echo "installing the extra $extra into $VENV"
  if "$VENV/bin/python" -m pip install --disable-pip-version-check --no-compile -e ".[$extra]"; then
    touch "$stamp"
  else
    echo "The extra '$extra' could not be installed here (it needs make and a C compiler); going on without it." >&2
  fi
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  cd "$(dirname "$0")/.."
  source scripts/lib/help.sh
  help_if_asked "$@"
  install "${1:-envs,embedded}"
  echo "installed; now run: source $VENV/bin/activate"
fi
