#!/usr/bin/env bash
# GPU kernel trace and statistics with rocprofv3; see --help. The work is in fusion_lab/rocm/wrappers.py.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "$0")")/fusion_lab/start.sh" fusion_lab.rocm.wrappers rocprofv3 "$@"
