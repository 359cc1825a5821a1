#!/usr/bin/env bash
# PyTorch profiler session; see --help. --ablation, --baseline and --compare-v1 work here too: the work is in
# run_pytorch_profiler.py.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "$0")")/fusion_lab/start.sh" run_pytorch_profiler "$@"
