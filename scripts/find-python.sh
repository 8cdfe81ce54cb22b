#!/usr/bin/env bash
# Prints the path of a Python >= 3.11: $PYTHON if set, else `python3`, else the newest named one on the path.
# With --all: one path a minor version, for every interpreter that could build trainmon (headers and venv there).
set -u

check='
import os, sys, sysconfig
if sys.version_info < (3, 11):
    sys.exit(1)
if "--complete" in sys.argv:
    import ensurepip
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        sys.exit(1)
print("%d.%d" % sys.version_info[:2], sys.executable)
'

if [ "${1:-}" = --all ]; then
    shopt -s nullglob
    for python in python3 python3.{11..16} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python; do
        "$python" -c "$check" --complete </dev/null 2>/dev/null
    done | sort -u -t ' ' -k 1,1 -V | cut -d ' ' -f 2-
    exit 0
fi

if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
else
    candidates=(python3 python3.{16..11})
fi
for python in "${candidates[@]}"; do
    if found=$("$python" -c "$check" </dev/null 2>/dev/null); then
        echo "${found#* }"
        exit 0
    fi
done
echo "No Python >= 3.11 found (tried: ${candidates[*]}); install one, or name it: make PYTHON=/path/to/python" >&2
exit 1
