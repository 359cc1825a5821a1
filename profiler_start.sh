#!/usr/bin/env bash
# Starts the Python behind the run_*.sh profiler scripts: profiler_start.sh FILE.py [arguments]
set -euo pipefail
python=${PYTHON:-python3}
if ! "$python" -ISc 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
    echo "$python is missing or older than Python 3.10; set PYTHON to the interpreter that has torch" >&2
    exit 3
fi
exec "$python" "$(dirname "$(readlink -f "$0")")/$1" "${@:2}"
