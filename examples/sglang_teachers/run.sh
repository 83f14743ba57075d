#!/usr/bin/env bash
# Trains two specialists, serves each with SGLang on this machine's CPU, and merges them through the servers: once
# with the student in the training process, once with the student on two servers of its own.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh sglang
here=examples/sglang_teachers runs=runs/sglang-teachers
ports=(31610 31611 31612 31613)

[ -e "$runs/specialists/specialists/add3/config.json" ] ||
  .venv/bin/opd specialist "$here/recipe.yaml" --out "$runs/specialists"

PYTHON=$python bash "$here/cpu_server/install.sh" >/dev/null
servers=()
trap 'for pid in "${servers[@]}"; do kill -- "-$pid" 2>/dev/null || true; done' EXIT
models=(specialists/reverse specialists/add3 base base)
for index in "${!ports[@]}"; do
  setsid bash "$here/cpu_server/serve.sh" "$runs/specialists/${models[$index]}" "${ports[$index]}" \
    --context-length 64 >"$runs/server-$index.log" 2>&1 &
  servers+=($!)
done
for port in "${ports[@]}"; do
  for _ in $(seq 900); do
    "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/ready', timeout=5)" 2>/dev/null && break
    sleep 1
  done
done

.venv/bin/opd doctor "$here/recipe.yaml" "$here/merge.yaml"
.venv/bin/opd run "$here/recipe.yaml" "$here/merge.yaml" --out "$runs/merge" "$@"
.venv/bin/opd run "$here/recipe.yaml" "$here/merge.yaml" "$here/student.yaml" --out "$runs/merge-served" "$@"
