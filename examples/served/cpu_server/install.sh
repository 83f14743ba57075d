#!/usr/bin/env bash
# Makes the environment of an SGLang server that runs on a CPU, once, and prints the path of its interpreter.
# The server shares nothing with the project's own environment: it pins what it needs, and talks HTTP.
# OPD_SGLANG_ENV names the folder (about 3 GB; default ~/.cache/opd/sglang-VERSION). A second caller waits.
set -euo pipefail
version=0.5.23
folder=${OPD_SGLANG_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/opd/sglang-$version}
mkdir -p "$folder"
exec 9>"$folder/lock"
flock 9
if [ ! -e "$folder/ready" ]; then
  rm -rf "$folder/venv"
  "${PYTHON:-python3}" -m venv "$folder/venv"
  pip() { "$folder/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check "$@" >&2; }
  echo "torch==2.13.0" >"$folder/constraints"
  pip torch==2.13.0
  # Its own requirements bring CUDA: what a CPU needs is in the list beside this script.
  pip --no-deps "sglang==$version" torchvision==0.28.0
  pip --constraint "$folder/constraints" --requirement "$(dirname "${BASH_SOURCE[0]}")/requirements.txt"
  touch "$folder/ready"
fi
echo "$folder/venv/bin/python"
