# `make help` lists what there is. Everything happens in virtual environments below this folder and in build/.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := build

VENV ?= .venv
# A machine that has PyPI only gets the CUDA build on Linux x86-64; point pip's index at PyTorch's CPU one to avoid it.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

PY := $(VENV)/bin/python
PYTEST := $(PY) -m pytest $(PYTEST_ARGS)
SOURCES := setup.py $(shell find csrc -name '*.[ch]')
FORMATTED := $(shell find csrc -name '*.[ch]')
# What must hold wherever the compiled code was built differently or runs elsewhere.
CORE_TESTS := tests/kernels tests/config tests/engine tests/health
TIERS := baseline avx2 avx512

.PHONY: help build test demo lint format tiers asan aarch64 tsan valgrind numpy126 pythons trackers mindspore dist soak bench clean distclean

help: ## this list
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/  \1\t\2/p' Makefile | expand -t 14

build: $(VENV)/.built ## virtual environment in .venv, extensions in place

$(VENV)/.installed: pyproject.toml scripts/bootstrap.sh scripts/build-requires.py
	scripts/bootstrap.sh
	[ -x $(PY) ] || "$$(scripts/find-python.sh)" -m venv $(VENV)
	$(PY) -m pip install -q -r <($(PY) scripts/build-requires.py) "$(TORCH)"
	touch $@

# Installing compiles everything in a folder that goes away; later edits take the incremental way.
$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	if [ $@ -nt $(VENV)/.installed ]; then
	    $(PY) setup.py -q build_ext --inplace
	else
	    $(PY) -m pip install -q --no-build-isolation -e '.[dev,torch,tensorboard,parquet,prometheus]'
	fi
	touch $@

test: build ## all tests but those of sdist and wheel
	$(PYTEST) -m "not packaging"

demo: build ## train the small GPT of examples/gpt
	$(PY) examples/gpt/train.py examples/gpt/train.yaml $(DEMO_ARGS)

lint: build ## ruff, mypy, import-linter, clang-format
	failed=0
	$(VENV)/bin/ruff check . || failed=1
	$(VENV)/bin/ruff format --check . || failed=1
	$(PY) -m mypy || failed=1
	$(VENV)/bin/lint-imports || failed=1
	$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED) || failed=1
	exit $$failed

format: build ## apply ruff and clang-format
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(FORMATTED)

tiers: build ## kernel tests once per instruction-set tier
	available=$$($(PY) -c 'import trainmon; print(*trainmon.cpu_info()["available"])')
	for tier in $(TIERS); do
	    [[ " $$available " == *" $$tier "* ]] || { echo "== $$tier skipped: this machine has $$available"; continue; }
	    echo "== TRAINMON_CPU=$$tier"
	    TRAINMON_CPU=$$tier $(PYTEST) tests/kernels
	done

# The copy keeps instrumented objects apart from the others; it comes first on PYTHONPATH. libstdc++ is preloaded
# because the sanitizer's exception hook must find it before torch brings it along.
ASAN := build/asan
ASAN_ENV = LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc

asan: build ## kernel and config tests, and the C tests, under ASan and UBSan
	mkdir -p $(ASAN)
	rm -rf $(ASAN)/{csrc,docs,trainmon,tests}
	tar -c --exclude='*.so' --exclude=_libs --exclude=__pycache__ \
	    csrc docs trainmon tests setup.py pyproject.toml README.md | tar -x -C $(ASAN)
	python=$$PWD/$(PY)
	(cd $(ASAN) && TRAINMON_SANITIZE=address,undefined $$python setup.py -q build_ext --inplace)
	export PYTHONPATH=$$PWD/$(ASAN)
	(cd $(ASAN) && $(ASAN_ENV) $$python -c 'import trainmon; assert "address sanitizer" in trainmon.build_info()["switches"]')
	(cd $(ASAN) && $(ASAN_ENV) $$python -m pytest $(PYTEST_ARGS) --capture=sys tests/kernels tests/config)
	$(MAKE) -s -C csrc/tests check SANITIZE=1 UNDER="env TM_TEST_SAMPLE=61"

# The C tests alone: what is slow to run takes a sample of the long lists of cases, but every digest.
CTESTS := $(MAKE) -s -C csrc/tests check

aarch64: ## the C tests cross-compiled, on qemu: the digests of x86-64
	scripts/bootstrap.sh aarch64
	$(CTESTS) BUILD=$$PWD/build/ctests-aarch64 CC=aarch64-linux-gnu-gcc LDFLAGS=-static \
	    UNDER="env TM_TEST_SAMPLE=61 qemu-aarch64"

# The tests of what starts threads; the others would take a quarter of an hour.
THREADED := threads bits stage diff compare fingerprint histogram moe attention spectral

tsan: ## the C tests of what starts threads under ThreadSanitizer
	$(CTESTS) BUILD=$$PWD/build/ctests SANITIZE=thread UNDER="env TM_TEST_SAMPLE=101" TESTS="$(THREADED)"

valgrind: ## the C tests under valgrind, which knows no AVX-512
	scripts/bootstrap.sh valgrind
	$(CTESTS) BUILD=$$PWD/build/ctests-valgrind \
	    UNDER="env TM_TEST_SAMPLE=101 valgrind -q --error-exitcode=1 --leak-check=full --errors-for-leak-kinds=definite --show-leak-kinds=definite"

# NumPy 1.26 in front of everything that .venv has, the extension built on NumPy 2 included.
numpy126: build ## kernel, config, engine and health tests on NumPy 1.26
	if $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 13))'; then
	    echo "skipped: NumPy 1.26 does not exist for the Python in $(VENV); use 3.11 or 3.12"
	    exit 0
	fi
	old=$$PWD/build/numpy126
	[ -d $$old ] || $(PY) -m pip install -q --no-deps --target $$old 'numpy==1.26.*'
	PYTHONPATH=$$old $(PY) -c 'import numpy; print("NumPy", numpy.__version__)'
	PYTHONPATH=$$old $(PYTEST) $(CORE_TESTS)

pythons: build ## kernel, config, engine and health tests on every other Python found
	own=$$($(PY) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	for python in $$(scripts/find-python.sh --all); do
	    version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	    [ $$version != $$own ] || continue
	    echo "== Python $$version"
	    venv=.venv-$$version
	    [ -x $$venv/bin/python ] || $$python -m venv $$venv
	    $$venv/bin/python -m pip install -q -r <($(PY) scripts/build-requires.py)
	    $$venv/bin/python -m pip install -q --no-build-isolation -e '.[test]'
	    $$venv/bin/python -m pytest $(PYTEST_ARGS) $(CORE_TESTS) tests/launch/test_script.py
	done

# The clients bring much along, so they have an environment of their own; trainmon is taken from here.
TRACKERS := wandb swanlab trackio

trackers: build ## the bridge to real experiment trackers, offline, in .venv-trackers
	[ -x .venv-trackers/bin/python ] || $(PY) -m venv .venv-trackers
	.venv-trackers/bin/python -m pip install -q numpy rich pytest $(TRACKERS)
	PYTHONPATH=$$PWD .venv-trackers/bin/python -m pytest $(PYTEST_ARGS) tests/trackers

# 2.8 GB once unpacked. Its NumPy is 1.26, on which the extension of .venv runs; wheels are for Python 3.11.
MINDSPORE ?= mindspore==2.10.*
# Its own requirements ask for a MindSpore and a HyperParallel that nobody can install; the GRAPH trainer needs neither.
MINDFORMERS ?= mindformers==2.1.0 mindpet==1.0.4
# Their PyNative trainers have loops of their own, and import on the same MindSpore.
OLDER_MINDFORMERS ?= 2.0.0 1.9.0

mindspore: build ## the training loops of MindSpore and MindFormers, on a CPU, in .venv-mindspore
	if ! $(PY) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
	    echo "skipped: $(MINDSPORE) is for Python 3.11, which $(VENV) has not"
	    exit 0
	fi
	if [ ! -x .venv-mindspore/bin/python ] && [ $$(df --output=avail -k . | tail -1) -lt 5000000 ]; then
	    echo "skipped: MindSpore and MindFormers take 3.2 GB, and less than 5 GB are free here"
	    exit 0
	fi
	[ -x .venv-mindspore/bin/python ] || $(PY) -m venv .venv-mindspore
	.venv-mindspore/bin/python -m pip install -q "$(MINDSPORE)" 'numpy<2' rich pytest hypothesis PyYAML \
	    -r tests/hosts/mindformers/requirements.txt
	.venv-mindspore/bin/python -m pip install -q --no-deps $(MINDFORMERS)
	for version in $(OLDER_MINDFORMERS); do
	    older=.venv-mindspore/mindformers-$$version
	    [ -d $$older ] || .venv-mindspore/bin/python -m pip install -q --no-deps --target $$older mindformers==$$version
	done
	PYTHONPATH=$$PWD .venv-mindspore/bin/python -m pytest $(PYTEST_ARGS) tests/hosts/mindspore tests/hosts/mindformers

dist: build ## sdist and repaired wheel in dist/, installed and tried in clean environments
	rm -rf dist
	PYTHON=$(PY) scripts/wheel.sh dist
	TRAINMON_DIST=dist $(PYTEST) -m packaging tests/build

soak: build ## the long campaigns of the tests (tens of minutes)
	TRAINMON_SOAK=1 $(PYTEST) -m soak --durations=0
	[ ! -x .venv-mindspore/bin/python ] || PYTHONPATH=$$PWD TRAINMON_SOAK=1 .venv-mindspore/bin/python -m pytest \
	    $(PYTEST_ARGS) -m soak tests/hosts/mindformers

# A peer that is measured beside trainmon, with the packages that it imports; apart from everything else.
PEERS := mindstudio-probe pandas pytz python-dateutil six tzdata openpyxl et_xmlfile tqdm einops matplotlib contourpy \
    cycler fonttools kiwisolver pyparsing

bench: build ## benchmarks/RESULTS.md, OVERHEAD.md and MSPROBE.md
	[ -d build/peers ] || $(PY) -m pip install -q --no-deps --target build/peers $(PEERS) ||
	    echo "msProbe can't be had here: its rows are left out"
	$(PY) -m benchmarks $(BENCH_ARGS)

clean: ## built files
	rm -rf build dist trainmon/_libs
	rm -f trainmon/*.so $(VENV)/.built

distclean: clean ## built files and virtual environments
	rm -rf .venv .venv-* trainmon.egg-info
