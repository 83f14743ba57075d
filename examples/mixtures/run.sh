#!/usr/bin/env bash
# Trains a mixture's specialists and merges them, does the same with a dense model, then merges both ways round: dense
# teachers into the mixture, the mixture's specialists into the dense model. Into runs/mixtures, runs/mixtures-dense,
# runs/mixtures-from-dense and runs/mixtures-into-dense, or DIR and DIR-... of --out DIR. Other arguments go to all runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd
several_runs runs/mixtures "$@"

# merge_into FOLDER RECIPE BASE SPECIALISTS: the specialists of one run into the base of another.
merge_into() {
  run_into "$1" run "$2" --base null --model.config null --model.path "$3/base" --teachers \
    "{sort: {path: $4/specialists/sort}, reverse: {path: $4/specialists/reverse}, add3: {path: $4/specialists/add3}}" \
    --baselines.methods "[off_policy]"
}

mixture=examples/mixtures/recipe.yaml dense=examples/mixtures/recipe-dense.yaml
run_into "$out" run "$mixture"
run_into "$out-dense" run "$dense"
merge_into "$out-from-dense" "$mixture" "$out" "$out-dense"
merge_into "$out-into-dense" "$dense" "$out-dense" "$out"
"$python" examples/mixtures/table.py "$out"
