#!/usr/bin/env bash
# Accepts a GPU: checks and measures everything that needs one, in less than ten minutes, with nothing but torch and
# this repository. See README.md beside this file.
#   bash tests/gpu/accept.sh [--json FILE] [--only SECTION ...] [--ranks N] [--dry]
#   bash tests/gpu/accept.sh pack FOLDER [--python 3.12] [--tilelang] [--liger] [--cut-cross-entropy] [--lora]
# The second makes, on a machine with a network, the folder with what a machine of torch alone lacks. PYTHON names the
# interpreter, SITE that folder (default: build/gpu).
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${PYTHON:-python3}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
if [ "${1:-}" = pack ]; then
  shift
  PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m tests.gpu.pack "$@"
fi
archive="${SITE:-build/gpu}/packages.tar.xz"
if [ -f "$archive" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  tar -xJf "$archive" -C "$site"
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
elif [ -n "${SITE:-}" ]; then
  echo "$archive is not there; make it with: bash tests/gpu/accept.sh pack $SITE" >&2
  exit 2
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c "import torch"; then
  echo "$python has no torch; set PYTHON to one that has" >&2
  exit 2
fi
if ! missing=$("$python" -c "import transformers, accelerate, safetensors, numpy, pydantic, yaml, fsspec, xxhash, lmdb, rich, matplotlib, jinja2, pytest, hypothesis" 2>&1); then
  echo "this machine lacks packages (${missing##*$'\n'}); on one with a network: bash tests/gpu/accept.sh pack build/gpu," \
    "then bring build/gpu here" >&2
  exit 2
fi
"$python" -m tests.gpu.accept "$@"
