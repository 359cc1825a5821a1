#!/usr/bin/env bash
# Python call stack and timeline with rocprof-sys-python; see --help. The work is in rocm_profilers.py.
set -euo pipefail
exec "$(dirname "$(readlink -f "$0")")/profiler_start.sh" rocm_profilers.py rocprof-sys "$@"
