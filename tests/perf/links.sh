#!/usr/bin/env bash
# Row 17: all-reduces as bf16, int8 and int4 next to float32, between ranks in network namespaces whose links are bounded.
set -euo pipefail

usage() {
  cat <<'END'
usage: tests/perf/links.sh BIN RATE [option of sotto-perf ..]

  BIN    folder with sotto-run and sotto-perf
  RATE   of every link in both directions: 100mbit, 1gbit, none, ... (integration/netns/lab.sh)

RANKS (default 4) is the number of ranks. Good sizes for 20 operations per figure: --n 1000000 at 100mbit, --n 4000000 at
1gbit. Needs root, or permission to create user namespaces, and iproute2.
END
}

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
LAB=$HERE/../../integration/netns/lab.sh
RANKS=${RANKS:-4}
export NETLAB=${NETLAB:-sotto-links}

[ $# -ge 2 ] || { usage >&2 && exit 2; }
BIN=$(cd "$1" && pwd)
RATE=$2

if [ -z "${SOTTO_LINKS_INSIDE:-}" ]; then
  SOTTO_LINKS_INSIDE=1 exec "$LAB" enter "$HERE/links.sh" "$@"
fi
shift 2

"$LAB" up "$RANKS" "$RATE"
trap '"$LAB" down' EXIT
"$LAB" describe
"$BIN/sotto-run" -n "$RANKS" --rendezvous "tcp://$("$LAB" address 1):29500" --wrapper "'$LAB' wrap" -- \
  "$BIN/sotto-perf" allreduce_codecs --link "$RATE" "$@"
