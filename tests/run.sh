#!/usr/bin/env bash
# Installs `opd` with its test extra and runs every test, two files at a time. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh
install_opd test
"$python" -m ruff check .
"$python" -m ruff format --check .
exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
