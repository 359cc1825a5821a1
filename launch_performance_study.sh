#!/usr/bin/env bash
# Speed and memory of fusion settings over batch, length and depth; see --help. The work: performance_study.py.
set -euo pipefail
exec "$(dirname "$(readlink -f "$0")")/profiler_start.sh" performance_study.py "$@"
