# Installs Debian packages that tests need; sourced by run_tests.sh. Usage: need_package PROGRAM PACKAGE.
# Nothing is asked: as root, or where sudo needs no password, apt-get installs the package. Otherwise its tests are
# skipped and the summary says so, except in CI (CI=true), where a missing package is a failure.
need_package() {
  local program=$1 package=$2 become=()
  command -v "$program" > /dev/null && return
  if [ "$(id -u)" -ne 0 ]; then become=(sudo -n); fi
  if command -v apt-get > /dev/null && "${become[@]}" true 2> /dev/null; then
    "${become[@]}" apt-get install -y -q "$package" ||
      { "${become[@]}" apt-get update -q && "${become[@]}" apt-get install -y -q "$package"; } || true
  fi
  if ! command -v "$program" > /dev/null && [ "${CI:-}" = true ]; then
    echo "The Debian package $package is needed and could not be installed; add it to the CI image." >&2
    return 1
  fi
}
