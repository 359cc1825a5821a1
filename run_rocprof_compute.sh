#!/usr/bin/env bash
# Hardware counters and roofline with rocprof-compute; see --help. The work is in rocm_profilers.py.
set -euo pipefail
exec "$(dirname "$(readlink -f "$0")")/profiler_start.sh" rocm_profilers.py rocprof-compute "$@"
