#!/usr/bin/env bash
# Starts the Python behind the run_*.sh and launch_*.sh scripts: start.sh MODULE [arguments]
set -euo pipefail
python=${PYTHON:-python3}
if ! "$python" -ISc 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
    echo "$python is missing or older than Python 3.10; set PYTHON to the interpreter that has torch" >&2
    exit 3
fi
case $1 in
    fusion_lab.rocm.*) ;; # AMD's tools do without, for --dry-run and --help
    *)
        if ! "$python" -c 'import importlib.util as u; assert all(map(u.find_spec, ["torch", "numpy", "tqdm"]))' \
            2> /dev/null; then
            echo "$python lacks torch, numpy or tqdm: pip install -r requirements.txt, or set PYTHON" >&2
            exit 3
        fi
        ;;
esac
exec "$python" "$(dirname "$(readlink -f "$0")")/start.py" "$@"
