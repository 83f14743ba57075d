#!/usr/bin/env bash
# Trains three specialists and merges them, with the student on two SGLang servers, two teachers on one each and the
# third on a vLLM server, on this machine's CPU: the run starts and ends the servers itself. Arguments go to `opd run`;
# --out DIR, default runs/served.
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/install.sh
install_opd sglang
several_runs runs/served "$@"

say "environments for the servers (about 2.5 and 3 GB the first time, minutes)"
PYTHON=$python bash examples/served/cpu_server/install.sh >/dev/null
PYTHON=$python bash examples/served/vllm_cpu_server/install.sh >/dev/null
$resume || .venv/bin/opd doctor examples/served/recipe.yaml --run_dir "$out"
PYTHON=$python run_into "$out" run examples/served/recipe.yaml
