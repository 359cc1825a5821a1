#!/usr/bin/env bash
# Python call stack and timeline with rocprof-sys-python; see --help. The work is in fusion_lab/rocm/wrappers.py.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "$0")")/fusion_lab/start.sh" fusion_lab.rocm.wrappers rocprof-sys "$@"
