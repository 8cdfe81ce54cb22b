#!/usr/bin/env bash
# Makes sure that what pip cannot install is there: C compiler, pkg-config, libyaml, Python with headers and venv;
# or, by name, the tools of one target: bootstrap.sh aarch64, bootstrap.sh valgrind.
# On Debian and Ubuntu missing packages are installed (by sudo if need be); elsewhere their names are printed.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()

look() {
    missing=()
    case ${1:-} in
    aarch64)
        aarch64-linux-gnu-gcc -x c -E -include stdlib.h /dev/null >/dev/null 2>&1 || missing+=(aarch64-compiler)
        command -v qemu-aarch64 >/dev/null || missing+=(qemu)
        return
        ;;
    valgrind)
        command -v valgrind >/dev/null || missing+=(valgrind)
        return
        ;;
    esac
    "${CC:-cc}" -x c -E -include stdlib.h /dev/null >/dev/null 2>&1 || missing+=(compiler)
    command -v pkg-config >/dev/null || missing+=(pkg-config)
    pkg-config --exists yaml-0.1 2>/dev/null || missing+=(libyaml)
    local python
    if ! python=$(scripts/find-python.sh 2>/dev/null); then
        missing+=(python headers venv)
        return
    fi
    "$python" -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
        missing+=(headers)
    "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(venv)
}

look "$@"
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi

if ! command -v apt-get >/dev/null && [ $# -gt 0 ]; then
    echo "Missing: ${missing[*]}. Install them, then try again." >&2
    exit 1
fi
if ! command -v apt-get >/dev/null; then
    echo "Missing: ${missing[*]}. Install a C compiler, pkg-config, libyaml and Python >= 3.11, then try again:" >&2
    echo "  Fedora/openEuler: dnf install gcc make pkgconf-pkg-config libyaml-devel python3-devel" >&2
    echo "  macOS: xcode-select --install; brew install pkgconf libyaml openblas python" >&2
    exit 1
fi

declare -A package=(
    [compiler]="gcc libc6-dev" [pkg-config]=pkg-config [libyaml]=libyaml-dev
    [python]=python3 [headers]=python3-dev [venv]=python3-venv
    [aarch64-compiler]="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" [qemu]=qemu-user [valgrind]="valgrind libc6-dbg"
)
names=()
for what in "${missing[@]}"; do
    # shellcheck disable=SC2206  # a compiler is two packages
    names+=(${package[$what]})
done

sudo=()
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "Missing: ${missing[*]}. As root, run: apt-get install ${names[*]}" >&2
        exit 1
    fi
    sudo=(sudo)
fi
echo "Installing ${names[*]}"
export DEBIAN_FRONTEND=noninteractive
"${sudo[@]}" apt-get -q update </dev/null
"${sudo[@]}" apt-get -q install -y --no-install-recommends "${names[@]}" </dev/null

look "$@"
if [ ${#missing[@]} -gt 0 ]; then
    echo "Still missing after installing ${names[*]}: ${missing[*]}." >&2
    [ $# -eq 0 ] || exit 1
    echo "The distribution's packages serve its own python3; give another Python >= 3.11 with its headers and venv:" >&2
    echo "  make PYTHON=/path/to/python" >&2
    exit 1
fi
