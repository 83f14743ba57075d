#!/usr/bin/env bash
# Accepts a GPU: checks and measures everything that needs one, in less than ten minutes, with nothing but torch,
# transformers, pytest and this repository. See README.md beside this file.
#   bash tests/gpu/accept.sh [--json FILE] [--only SECTION ...] [--dry]
# PYTHON names the interpreter, SITE an archive (.tar.xz) of packages that the machine lacks.
set -euo pipefail
cd "$(dirname "$0")/../.."
if [ -n "${SITE:-}" ]; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  tar -xJf "$SITE" -C "$site"
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
"${PYTHON:-python3}" -m tests.gpu.accept "$@"
