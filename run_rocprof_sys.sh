#!/usr/bin/env bash
# Python call stack and timeline with rocprof-sys-python; see --help.
python=${PYTHON:-python3}
"$python" -ISc 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "set PYTHON to an interpreter of Python 3.10 or newer that has torch" >&2; exit 3; }
exec "$python" "$(dirname "$(readlink -f "$0")")/profile_rocm.py" rocprof-sys "$@"
