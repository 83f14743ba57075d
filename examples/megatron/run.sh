#!/usr/bin/env bash
# Trains two specialists and merges them on two ranks with tensor parallelism. Folder: $1 (default: runs/megatron).
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh megatron
.venv/bin/opd run examples/megatron/recipe.yaml --out "${1:-runs/megatron}"
