#!/usr/bin/env bash
# A base that never answers right: GRPO from it, which stops, then distillation from itself with the answer in the prompt.
# Into runs/self-distillation-grpo and runs/self-distillation, or --out DIR: DIR-grpo and DIR. Other arguments go to both.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd
several_runs runs/self-distillation "$@"
"$python" examples/self_distillation/data.py "$out-demonstrations.jsonl"
run_into "$out-grpo" specialist examples/self_distillation/base.yaml --domain sort \
  --sft.source "$out-demonstrations.jsonl" || say "GRPO has nothing to learn from; its base is distilled from itself"
run_into "$out" run examples/self_distillation/recipe.yaml --model.path "$out-grpo/base" --teachers.self.path "$out-grpo/base"
