#!/usr/bin/env bash
# The PyTorch profiler and the three ROCm profilers, one after the other; see --help. The work: all_profilers.py.
set -euo pipefail
exec "$(dirname "$(readlink -f "$0")")/profiler_start.sh" all_profilers.py "$@"
