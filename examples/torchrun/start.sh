#!/usr/bin/env bash
# One node of one cloud: ./start.sh CLOUD NODE_RANK HEAD, such as ./start.sh east 0 10.0.0.10
# Start it on both nodes of both clouds, in any order. Where a cloud has `listen`, its gateway runs beside it:
#   isthmus gateway job.toml --cloud east
set -euo pipefail
cloud=$1 node_rank=$2 head=$3

# A lost rank ends the whole cloud, and the other one with it; each torchrun then starts its ranks again, and
# the run goes on from the newest state that both have saved.
exec torchrun \
  --nnodes 2 --node-rank "$node_rank" --nproc-per-node 8 \
  --master-addr "$head" --master-port 29400 \
  --max-restarts 10 \
  -m isthmus run job.toml --cloud "$cloud"
