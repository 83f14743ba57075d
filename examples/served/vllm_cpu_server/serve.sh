#!/usr/bin/env bash
# vLLM's server on a CPU: serve.sh --model FOLDER --host 127.0.0.1 --port PORT [ITS OTHER ARGUMENTS]
set -euo pipefail
python=$(bash "$(dirname "${BASH_SOURCE[0]}")/install.sh")
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Compiling takes longer than what a small model computes.
exec "$python" -m vllm.entrypoints.openai.api_server --dtype float32 --enforce-eager "$@"
