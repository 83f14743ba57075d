#!/usr/bin/env bash
# Specialists whose tokenizer joins digits, then a student that reads characters and learns from them.
# Into runs/other-tokenizer-specialists and runs/other-tokenizer, or --out DIR: DIR-specialists and DIR. Other arguments
# go to both.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd
several_runs runs/other-tokenizer "$@"
"$python" examples/other_tokenizer/tokenizer.py "$out-bpe"
run_into "$out-specialists" specialist examples/other_tokenizer/specialists.yaml --model.tokenizer "$out-bpe"
of=$out-specialists/specialists
run_into "$out" run examples/other_tokenizer/recipe.yaml \
  --teachers.sort.path "$of/sort" --teachers.sort.tokenizer "$out-bpe" \
  --teachers.add3.path "$of/add3" --teachers.add3.tokenizer "$out-bpe"
