#!/usr/bin/env bash
# A base that never answers right: GRPO from it, which stops, then distillation from itself with the answer in the prompt,
# frozen, as the moving average of the student's weights (0.999 and 0.99), and as the student itself. Into
# runs/self-distillation and the same name with -grpo, -average, -average-99 and -living, or --out DIR and the same with
# DIR. Other arguments go to all.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd
several_runs runs/self-distillation "$@"
"$python" examples/self_distillation/data.py "$out-demonstrations.jsonl"
run_into "$out-grpo" specialist examples/self_distillation/base.yaml --domain sort \
  --sft.source "$out-demonstrations.jsonl" || say "GRPO has nothing to learn from; its base is distilled from itself"
distill() {  # FOLDER OPTION...
  local folder=$1
  shift
  run_into "$folder" run examples/self_distillation/recipe.yaml --model.path "$out-grpo/base" \
    --teachers.self.path "$out-grpo/base" "$@"
}
distill "$out"
distill "$out-average" --domains.sort.teacher average
distill "$out-average-99" --domains.sort.teacher average --teachers.average.moving_average 0.99
distill "$out-living" --domains.sort.teacher living
