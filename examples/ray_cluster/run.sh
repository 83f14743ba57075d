#!/usr/bin/env bash
# Starts a Ray cluster of two nodes on this machine, trains two specialists there and merges them, and ends the
# cluster. Into runs/ray-cluster. Arguments go to `opd run`.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd ray
exec "$python" examples/ray_cluster/cluster.py .venv/bin/opd run examples/ray_cluster/recipe.yaml "$@"
