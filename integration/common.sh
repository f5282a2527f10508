# shellcheck shell=bash
# Small helpers of the shell scripts: sourced, never run. The sourcing script has set -euo pipefail.
# shellcheck disable=SC2034  # the variables are for the scripts that source this file

SOTTO_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*"; }
warn() { printf '%s\n' "$*" >&2; }
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Usage errors have an exit code of their own, so that callers can tell them from failures.
usage_error() {
  printf '%s: %s (--help lists the options)\n' "$(basename "$0")" "$*" >&2
  exit 2
}

cores() { nproc 2>/dev/null || echo 1; }

# duration SECONDS: "3 min 20 s"; elapsed: since the start of the script.
duration() { printf '%d min %02d s' $(($1 / 60)) $(($1 % 60)); }
elapsed() { duration "$SECONDS"; }

# cmake_is_new_enough CMAKE: at least 3.25 (presets of version 6), and really runs: a version manager's shim may not.
cmake_is_new_enough() {
  local version
  version=$("$1" --version 2>/dev/null | sed -n '1s/^cmake version \([0-9]*\.[0-9]*\).*/\1/p') || return 1
  [ -n "$version" ] && [ "$(printf '3.25\n%s\n' "$version" | sort -V | head -n 1)" = 3.25 ]
}

# first_that_works CHECK CANDIDATE...: prints the first candidate that CHECK accepts.
first_that_works() {
  local check=$1 candidate
  shift
  for candidate in "$@"; do
    if "$check" "$candidate"; then
      printf '%s\n' "$candidate"
      return 0
    fi
  done
  return 1
}

ninja_runs() { "$1" --version >/dev/null 2>&1; }
python_has_matplotlib() { "$1" -c 'import matplotlib, numpy' >/dev/null 2>&1; }

# The distribution's programs go first: what setup.sh installs is what is used, whatever else is on PATH.
find_cmake() { first_that_works cmake_is_new_enough /usr/bin/cmake cmake; }
find_ninja() { first_that_works ninja_runs /usr/bin/ninja ninja; }
find_report_python() { first_that_works python_has_matplotlib /usr/bin/python3 python3; }

# need_tools: sets CMAKE, CTEST, NINJA and PYTHON, or says what is missing.
need_tools() {
  CMAKE=$(find_cmake) || die "no working cmake >= 3.25: run integration/setup.sh"
  CTEST=ctest
  [ "$CMAKE" = /usr/bin/cmake ] && CTEST=/usr/bin/ctest
  NINJA=$(find_ninja) || die "no working ninja: run integration/setup.sh"
  PYTHON=$(find_report_python) || die "no python3 with matplotlib and numpy: run integration/setup.sh"
  # A caller of another language finds in the compiler cache what the first one compiled.
  export LANG=C.UTF-8
  unset LC_ALL LC_CTYPE LC_MESSAGES
}
