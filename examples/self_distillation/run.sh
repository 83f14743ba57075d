#!/usr/bin/env bash
# A base that never answers right: GRPO from it, which stops, then distillation from itself with the answer in the prompt,
# frozen, as the moving average of the student's weights (0.999 and 0.99), and as the student itself. Into
# runs/self-distillation and the same name with -grpo, -average, -average-99 and -living, or --out DIR and the same with
# DIR. Then a base that is right at times: GRPO alone, with a right sibling and with feedback in the teacher's prompt, into
# the same with -partly, -partly-grpo, -partly-sibling and -partly-feedback. Other arguments go to all.
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

"$python" examples/self_distillation/data.py "$out-partly.jsonl" --partly
run_into "$out-partly" specialist examples/self_distillation/base.yaml --domain sort --sft.source "$out-partly.jsonl" \
  --specialist.steps 1 --specialist.prompts_per_step 64 --specialist.minibatches 1   # the step shows how it answers
learn() {  # NAME OPTION...
  local folder=$out-partly-$1
  shift
  run_into "$folder" specialist examples/self_distillation/partly.yaml --domain sort --model.path "$out-partly/base" "$@"
}
learn grpo
for told in sibling feedback; do
  learn "$told" --specialist.opd "{teacher: average, coef: 1.0, loss: {type: full}, teacher_prompt: \"{$told}={prompt}\"}"
done
