#!/bin/sh
# enter.sh HOST COMMAND..: what MPI launchers use as their remote shell. Runs the command in the host of the lab whose
# number HOST ends with, under that host's name, so that ranks count as being on different machines.
set -eu
number=${1##*[!0-9]}
shift
exec "$SOTTO_LAB" exec "$number" unshare --uts sh -c "hostname host$number; exec $*"
