#!/bin/sh
# Two nodes of one job, both on this machine. On two machines: the same command on each, with the first one's
# name instead of localhost. Takes a port as its only argument.
set -eu
port=${1:-29400}
here=$(dirname "$0")
checkpoints=$(mktemp -d)

node() {
    ftrun --nnodes 2 --nproc-per-node 2 --node-id "$1" --rdzv-endpoint "localhost:$port" \
        "$here/train_lm.py" --steps 60 --checkpoint-dir "$checkpoints"
}

# Ctrl-C and SIGTERM end the other one, too.
node 1 &
other=$!
trap 'kill "$other" 2>/dev/null || true' EXIT INT TERM
node 0
wait "$other"
trap - EXIT
rm -r "$checkpoints"
