#!/usr/bin/env bash
# k3-local after the set-up: the whole system on this machine. Arguments go to k3-local.
source "$(dirname "$0")/env.sh"
.ci/setup.sh
unset OMP_NUM_THREADS  # the services divide the cores themselves
exec k3-local "$@"
