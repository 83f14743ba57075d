#!/usr/bin/env bash
# Installs `opd` with reasoning-gym, makes the tokenizer and the demonstrations, then: base -> specialists -> merge ->
# other merges -> report. Then the same merge from soft labels on the teachers' answers. Into runs/five-tasks and
# runs/five-tasks-soft, or --out DIR: DIR and DIR-soft. Other arguments go to both runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd reasoning-gym
several_runs runs/five-tasks "$@"
inputs=runs/five-tasks-inputs recipe=examples/five_tasks/recipe.yaml
[ -e "$inputs/demonstrations.jsonl" ] || "$python" examples/five_tasks/data.py "$inputs"
run_into "$out" run "$recipe"
teachers=()
for task in spell_backward number_sorting chain_sum caesar_cipher palindrome_generation; do
  teachers+=("--teachers.$task.path" "$out/specialists/$task")
done
run_into "$out-soft" run "$recipe" --model.config null --model.tokenizer null --model.path "$out/base" --sft null \
  "${teachers[@]}" --distill.prefixes teacher --distill.loss.kind forward --baselines.methods "[]"
"$python" examples/table.py five_tasks "$out"
