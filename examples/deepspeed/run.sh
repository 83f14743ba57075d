#!/usr/bin/env bash
# Trains two specialists and merges them on two ranks with ZeRO-3. Folder: $1 (default: runs/deepspeed).
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh deepspeed
.venv/bin/opd run examples/deepspeed/recipe.yaml --out "${1:-runs/deepspeed}"
