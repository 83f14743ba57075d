#!/usr/bin/env bash
# Trains two specialists, merges them with Megatron-Core teachers, merges them again with torch teachers,
# compares the two, and checks that both score alike. Folders: $1 (default: runs/megatron-teachers) and $1-torch.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh megatron
recipe=examples/megatron_teachers/recipe.yaml
out=${1:-runs/megatron-teachers}
.venv/bin/opd run "$recipe" --out "$out"
# The same base and teachers for what follows.
given=(--base null --model.config null --model.path "$out/base" --teachers
  "{reverse: {path: $out/specialists/reverse}, add3: {path: $out/specialists/add3}}")
.venv/bin/opd run "$recipe" "${given[@]}" --distill.backend torch --out "$out-torch"
.venv/bin/opd doctor "$recipe" --parity "${given[@]}"
"$python" examples/megatron_teachers/compare.py "$out" "$out-torch"
