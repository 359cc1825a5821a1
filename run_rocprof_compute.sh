#!/usr/bin/env bash
# Hardware counters and roofline with rocprof-compute; see --help. The work is in fusion_lab/rocm/wrappers.py.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "$0")")/fusion_lab/start.sh" fusion_lab.rocm.wrappers rocprof-compute "$@"
