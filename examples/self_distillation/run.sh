#!/usr/bin/env bash
# A base that never answers right: GRPO from it, which stops, then distillation from itself with the answer in the prompt,
# frozen, as the moving average of the student's weights (0.999 and 0.99), and as the student itself. Into
# runs/self-distillation and the same name with -grpo, -average, -average-99 and -living, or --out DIR and the same with
# DIR. Then a base that is hardly ever right: GRPO alone, and with the answer, feedback and a right sibling in the teacher's
# prompt, into the same with -rarely, -rarely-grpo, -rarely-label, -rarely-feedback and -rarely-sibling. Other arguments go
# to all.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd
several_runs runs/self-distillation "$@"
"$python" examples/self_distillation/data.py "$out-demonstrations.jsonl"
run_into "$out-grpo" specialist examples/self_distillation/base.yaml --domain sort \
  --sft.source "$out-demonstrations.jsonl" ||
  say "GRPO ended with the words above: nothing to learn from is expected here. Its base is distilled from itself"
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

"$python" examples/self_distillation/data.py "$out-rarely.jsonl" --rarely
longer=(--domains.sort.params.digits 8 --rollout.max_new_tokens 10)
run_into "$out-rarely" specialist examples/self_distillation/base.yaml --domain sort --sft.source "$out-rarely.jsonl" \
  "${longer[@]}" --specialist.steps 1 --specialist.prompts_per_step 128 --specialist.minibatches 1   # its step shows how it answers
learn() {  # NAME OPTION...
  local folder=$out-rarely-$1
  shift
  run_into "$folder" specialist examples/self_distillation/rarely.yaml --domain sort --model.path "$out-rarely/base" "$@"
}
learn grpo || say "GRPO ended with the words above: nothing to learn from is expected here"
for told in label feedback sibling; do
  learn "$told" --specialist.opd "{teacher: average, coef: 1.0, loss: {type: full}, teacher_prompt: \"{$told}={prompt}\"}" ||
    say "$told ended with the words above"
done
