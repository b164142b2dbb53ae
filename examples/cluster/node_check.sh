#!/bin/sh
# A check of one node, before it takes a seat in the job:
#
#     ftrun --node-check "sh node_check.sh 8" ...
#
# The argument is the number of GPUs that the node must have; without one they are not counted. The last line
# that this prints is the reason for which the node is kept out. Without dcgmi, which is part of NVIDIA's DCGM,
# the GPUs are not tested.
#
# Checked with shellcheck and stand-ins for dcgmi and nvidia-smi. Not tried on a cluster.
set -u

log=${TMPDIR:-/tmp}/node_check.$(id -u).log

fail() {
    echo "$*"
    exit 1
}

if [ $# -gt 0 ]; then
    # A driver that is broken may not answer.
    found=$(timeout 30 nvidia-smi -L | grep -c '^GPU ')
    [ "$found" -ge "$1" ] || fail "$found of $1 GPUs"
fi
if command -v dcgmi >/dev/null; then
    # Level 1 takes seconds. Level 2 also tests memory and PCIe, and takes minutes: see --node-check-timeout.
    timeout 60 dcgmi diag -r 1 >"$log" 2>&1 || fail "dcgmi diag has failed: see $log"
fi
for folder in "${TMPDIR:-/tmp}" /dev/shm; do
    free=$(df -Pk "$folder" | awk 'END { print $4 }')
    [ "$free" -ge 16384 ] || fail "less than 16 MiB free in $folder"
done
