#!/bin/sh
# One command for a machine with a GPU: builds, tests and measures what is there, at most 8 minutes; docs/gpu.md.
#   bench/gpu_check.sh                 everything; results in build/gpu_check (or $OUT)
#   bench/gpu_check.sh --rehearse      every part on the CPU with tiny shapes: no GPU figures
#   bench/gpu_check.sh --only rollout  some parts; --help lists the rest
# PYTHON names the interpreter; by default the repository's .venv, else python3.
cd "$(dirname "$0")/.." || exit 2
if [ -z "$PYTHON" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
exec "$PYTHON" bench/gpu/driver.py "$@"
