#!/usr/bin/env bash
# Speed and memory of fusion settings over batch, length and depth; see --help.
python=${PYTHON:-python3}
"$python" -ISc 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "set PYTHON to an interpreter of Python 3.10 or newer that has torch" >&2; exit 3; }
exec "$python" "$(dirname "$(readlink -f "$0")")/launch_performance_study.py" "$@"
