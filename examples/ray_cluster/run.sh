#!/usr/bin/env bash
# Starts a Ray cluster of two nodes on this machine, trains two specialists there and merges them, and ends the
# cluster. Folder: $1 (default: runs/ray-cluster).
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh ray
out=${1:-runs/ray-cluster}
shift || true
"$python" examples/ray_cluster/cluster.py .venv/bin/opd run examples/ray_cluster/recipe.yaml --out "$out" "$@"
