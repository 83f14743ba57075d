#!/usr/bin/env bash
# sglang.launch_server on a CPU: serve.sh --model-path FOLDER --host 127.0.0.1 --port PORT [ITS OTHER ARGUMENTS]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$(bash "$here/install.sh")
export PYTHONPATH="$here:$here/../../../opd/served/plugin" SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0
exec "$python" -m sglang.launch_server --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch --lora-backend torch_native \
  --disable-overlap-schedule --max-total-tokens 8192 --max-running-requests 16 --enable-return-hidden-states \
  --mem-fraction-static 0.3 --skip-server-warmup --sleep-on-idle "$@"
