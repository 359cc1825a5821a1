#!/usr/bin/env bash
# Starts the Python behind the run_*.sh and launch_*.sh scripts: start.sh MODULE [arguments]
set -euo pipefail
python=${PYTHON:-python3}
if ! "$python" -ISc 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
    echo "$python is missing or older than Python 3.10; set PYTHON to the interpreter that has torch" >&2
    exit 3
fi
exec "$python" "$(dirname "$(readlink -f "$0")")/start.py" "$@"
