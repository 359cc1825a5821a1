#!/usr/bin/env bash
# The PyTorch profiler and the three ROCm profilers, one after the other; see --help. The work is in
# fusion_lab/rocm/all_profilers.py.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "$0")")/fusion_lab/start.sh" fusion_lab.rocm.all_profilers "$@"
