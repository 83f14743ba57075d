#!/usr/bin/env bash
# Trains two specialists, serves each with SGLang on this machine's CPU, and merges them through the servers: once
# with the student in the training process, once with the student on two servers of its own. Into
# runs/sglang-teachers, or --out DIR. Other arguments go to every `opd run`.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd sglang
several_runs runs/sglang-teachers "$@"
here=examples/sglang_teachers
first="$out/specialists"

run_into "$first" specialist "$here/recipe.yaml"

say "an environment for the servers (about 2.5 GB the first time, minutes)"
PYTHON=$python bash "$here/cpu_server/install.sh" >/dev/null
# Free ports; the same ones on --resume, since a run's settings are those it began with.
$resume && [ -e "$out/ports" ] || "$python" -c '
import socket
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4)]
print(*(one.getsockname()[1] for one in sockets))' >"$out/ports"
read -ra ports <"$out/ports"
servers=()
trap 'bash "$here/cpu_server/end.sh" "${servers[@]}"' EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
models=(specialists/reverse specialists/add3 base base)
for index in "${!ports[@]}"; do
  setsid bash "$here/cpu_server/serve.sh" "$first/${models[$index]}" "${ports[$index]}" \
    --context-length 64 >"$out/server-$index.log" 2>&1 &
  servers+=($!)
done
for index in "${!ports[@]}"; do
  say "waiting for the server of $first/${models[$index]} (log: $out/server-$index.log)"
  until "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:${ports[$index]}/ready', timeout=5)" 2>/dev/null; do
    kill -0 "${servers[$index]}" 2>/dev/null || { echo "it ended:" && tail -n 20 "$out/server-$index.log" && exit 1; }
    sleep 1
  done
done

url() { echo "http://127.0.0.1:${ports[$1]}"; }
# Over merge.yaml and student.yaml: where the models and the servers of this run are.
given=(--model.path "$first/base" --teachers
  "{reverse: {type: sglang, path: $first/specialists/reverse, urls: ['$(url 0)']},
    add3: {type: sglang, path: $first/specialists/add3, urls: ['$(url 1)']}}")
$resume || .venv/bin/opd doctor "$here/recipe.yaml" "$here/merge.yaml" "${given[@]}" --run_dir "$out/merge"
run_into "$out/merge" run "$here/recipe.yaml" "$here/merge.yaml" "${given[@]}"
run_into "$out/merge-served" run "$here/recipe.yaml" "$here/merge.yaml" "$here/student.yaml" "${given[@]}" \
  --rollout.engine.urls "['$(url 2)', '$(url 3)']"
