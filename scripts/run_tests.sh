#!/usr/bin/env bash
# Installs what the tests use, then runs ruff, codespell, the type checker and the tests. Arguments go to pytest:
#   bash scripts/run_tests.sh                 the default suite, several test files at a time
#   bash scripts/run_tests.sh -m slow         the slow tests, one at a time
#   bash scripts/run_tests.sh tests/advantage one folder
cd "$(dirname "$0")/.."
source scripts/lib/help.sh
source scripts/install.sh
source scripts/lib/system_packages.sh
need_package bwrap bubblewrap
for program in buildah skopeo umoci; do need_package "$program" "$program"; done
install envs,embedded,dev,docs
try_install text-games
# A test of the default suite that takes five minutes hangs: it fails, and its stack is printed.
# Two workers more than cores, six at most: a third of a worker's time is spent waiting for servers and environments.
workers=$(($(nproc) < 4 ? $(nproc) + 2 : 6))
default=(-m "not slow" --timeout 300 --numprocesses "$workers" --dist loadfile --no-loadscope-reorder)
case " $* " in *" -m "*) selection=() ;; *) selection=("${default[@]}") ;; esac
"$VENV/bin/python" -m ruff check .
"$VENV/bin/python" -m ruff format --check .
"$VENV/bin/python" -m codespell_lib
# The type checker keeps one core busy for a while, so it runs beside the tests. Its complaints come last.
said=$(mktemp) status=0
trap 'rm -f "$said"' EXIT
"$VENV/bin/python" -m basedpyright --pythonpath "$VENV/bin/python" > "$said" &
checker=$!
"$VENV/bin/python" -m pytest -rs "${selection[@]}" "$@" || status=$?
wait "$checker" || { status=$?; cat "$said"; }
exit "$status"
