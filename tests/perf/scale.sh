#!/usr/bin/env bash
# What a rank of a large group costs: 4 to 32 ranks as processes, 64 as threads of one.
set -euo pipefail

usage() {
  cat <<'END'
usage: tests/perf/scale.sh BIN [option of sotto-perf ..]

  BIN    folder with sotto-run and sotto-perf

RANKS (default "4 8 16 32") are the sizes of groups of processes.
END
}

[ $# -ge 1 ] || { usage >&2 && exit 2; }
BIN=$(cd "$1" && pwd)
shift

for ranks in ${RANKS:-4 8 16 32}; do
  "$BIN/sotto-run" -n "$ranks" -- "$BIN/sotto-perf" scale "$@"
done
"$BIN/sotto-perf" scale "$@"
