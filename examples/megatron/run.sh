#!/usr/bin/env bash
# Trains two specialists and merges them on two ranks with tensor parallelism, into runs/megatron.
# Arguments go to `opd run`.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd megatron
exec .venv/bin/opd run examples/megatron/recipe.yaml "$@"
