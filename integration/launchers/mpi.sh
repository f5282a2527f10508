#!/usr/bin/env bash
# Starts ranks with mpirun of Open MPI or mpiexec of MPICH, whichever MPIRUN (mpirun) is:
#   integration/launchers/mpi.sh --host 10.0.0.1:4,10.0.0.2:4 -n 8 [-- PROGRAM ARGUMENT...]
# Words before -- are mpirun's. MPI only starts the processes, and tells them where rank 0 is: Sotto's messages are its own.
set -euo pipefail
words=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  words+=("$1")
  shift
done
if [ $# -gt 0 ]; then shift; fi
if [ $# -eq 0 ]; then set -- python3 "$(dirname "${BASH_SOURCE[0]}")/train.py"; fi
exec "${MPIRUN:-mpirun}" "${words[@]}" "$@"
