#!/usr/bin/env bash
# Speed and memory of fusion settings over batch, length and depth; see --help. The work: fusion_lab/study/command.py.
set -euo pipefail
exec bash "$(dirname "$(readlink -f "$0")")/fusion_lab/start.sh" fusion_lab.study.command "$@"
