#!/usr/bin/env bash
# Installs `opd` with its test extra and runs every test, three files at a time: a third of the time a test waits, for a
# process that starts or one that is to be missed. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install.sh
install_opd test
"$python" -m ruff check .
"$python" -m ruff format --check .
exec "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
