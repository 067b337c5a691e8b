#!/usr/bin/env bash
# All that one hour of a GPU is for, see gpu.py: bench/gpu.sh [--dry] [--help]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
[ -x "$(command -v "$python")" ] || python=python3
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}  # on a machine where nothing is installed
exec "$python" bench/gpu.py "$@"
