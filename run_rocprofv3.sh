#!/usr/bin/env bash
# GPU kernel trace and statistics with rocprofv3; see --help. The work is in rocm_profilers.py.
set -euo pipefail
exec "$(dirname "$(readlink -f "$0")")/profiler_start.sh" rocm_profilers.py rocprofv3 "$@"
