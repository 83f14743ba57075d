#!/usr/bin/env bash
# Makes tasks and demonstrations, trains two agents and a specialist for single answers, and merges them.
# Arguments go to `opd run`, for example: bash examples/agents/run.sh --seed 1 --out runs/agents-1
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd textworld
[ -e runs/agents-data/tokenizer ] || .venv/bin/python examples/agents/prepare.py runs/agents-data
exec .venv/bin/opd run examples/agents/recipe.yaml "$@"
