#!/usr/bin/env bash
# A base that never answers right: GRPO from it, which stops, then distillation from itself with the answer in the prompt.
# Arguments go to `opd run`, for example: bash examples/self_distillation/run.sh --distill.steps 50
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd
here=runs/self_distillation
if [ ! -d $here/grpo/base ]; then
  .venv/bin/python examples/self_distillation/data.py $here/demonstrations.jsonl
  .venv/bin/opd specialist examples/self_distillation/base.yaml --domain sort --out $here/grpo ||
    say "GRPO has nothing to learn from; distillation from the same base follows"
fi
exec .venv/bin/opd run examples/self_distillation/recipe.yaml --out $here/merge "$@"
