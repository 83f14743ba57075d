#!/usr/bin/env bash
# Installs `opd` and runs the main job end to end: base -> specialists -> merge -> baselines -> report.
# Arguments go to `opd run`, for example: bash examples/quickstart.sh --seed 1 --out runs/quickstart-1
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh
install_opd
exec .venv/bin/opd run examples/quickstart/recipe.yaml "$@"
