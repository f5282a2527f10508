#!/usr/bin/env bash
# Starts ranks with torchrun, on each machine of the job:
#   NODES=2 NODE=0 MASTER=10.0.0.1 RANKS=4 integration/launchers/torchrun.sh [PROGRAM ARGUMENT...]
# NODES machines (1), of which this is number NODE (0); MASTER: address of machine 0; RANKS on each (2).
# torchrun's own store listens at PORT (29500) of machine 0, and Sotto's rendezvous at the port after it.
set -euo pipefail
if [ $# -eq 0 ]; then set -- "$(dirname "${BASH_SOURCE[0]}")/train.py"; fi
exec torchrun --nnodes "${NODES:-1}" --node-rank "${NODE:-0}" --nproc-per-node "${RANKS:-2}" \
  --master-addr "${MASTER:-127.0.0.1}" --master-port "${PORT:-29500}" "$@"
