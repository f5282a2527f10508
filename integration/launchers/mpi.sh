#!/usr/bin/env bash
# Starts ranks with Open MPI's mpirun:
#   MASTER=10.0.0.1 integration/launchers/mpi.sh --host 10.0.0.1:4,10.0.0.2:4 -n 8 [-- PROGRAM ARGUMENT...]
# Words before -- are mpirun's. MASTER: an address of the machine of rank 0 that the others reach (127.0.0.1: one machine);
# rank 0 listens at PORT (29500) there. MPI only starts the processes: Sotto's messages are its own.
set -euo pipefail
words=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  words+=("$1")
  shift
done
if [ $# -gt 0 ]; then shift; fi
if [ $# -eq 0 ]; then set -- python3 "$(dirname "${BASH_SOURCE[0]}")/train.py"; fi
export SOTTO_RENDEZVOUS=tcp://${MASTER:-127.0.0.1}:${PORT:-29500}
exec mpirun -x SOTTO_RENDEZVOUS "${words[@]}" "$@"
