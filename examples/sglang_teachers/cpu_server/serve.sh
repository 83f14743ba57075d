#!/usr/bin/env bash
# Serves a Hugging Face folder with SGLang on a CPU: serve.sh FOLDER PORT [ARGUMENTS FOR THE SERVER]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$(bash "$here/install.sh")
folder=$1 port=$2
shift 2
export PYTHONPATH="$here" SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0
exec "$python" -m sglang.launch_server --model-path "$folder" --host 127.0.0.1 --port "$port" \
  --device cpu --dtype float32 --attention-backend torch_native --sampling-backend pytorch \
  --disable-overlap-schedule --max-total-tokens 8192 --max-running-requests 16 --enable-return-hidden-states \
  --skip-server-warmup --sleep-on-idle "$@"
