#!/usr/bin/env bash
# Trains two specialists and merges them on two ranks with ZeRO-3, into runs/deepspeed. Arguments go to `opd run`.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd deepspeed
exec .venv/bin/opd run examples/deepspeed/recipe.yaml "$@"
