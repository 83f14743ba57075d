#!/usr/bin/env bash
# Trains two specialists, merges them with Megatron-Core teachers, merges them again with torch teachers, compares
# the two, and checks that both score alike. Into runs/megatron-teachers and runs/megatron-teachers-torch, or --out
# DIR and DIR-torch. Other arguments go to both merges' `opd run`.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd megatron
several_runs runs/megatron-teachers "$@"
recipe=examples/megatron_teachers/recipe.yaml
run_into "$out" run "$recipe"
# The same base and teachers for what follows.
given=(--base null --model.config null --model.path "$out/base" --teachers
  "{reverse: {path: $out/specialists/reverse}, add3: {path: $out/specialists/add3}}")
run_into "$out-torch" run "$recipe" "${given[@]}" --distill.teachers streamed
.venv/bin/opd doctor "$recipe" --parity "${given[@]}"
"$python" examples/megatron_teachers/compare.py "$out" "$out-torch"
