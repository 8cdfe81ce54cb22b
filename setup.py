"""Builds the two C extensions; everything else is declared in pyproject.toml.

    trainmon._core     csrc/python/*.c, linked with static libraries of csrc/core/*.c and, once a tier, csrc/kernels/*.c
    trainmon._config   csrc/yaml/*.c, linked with libyaml

Environment (docs/development.md tells more):
    TRAINMON_BLAS=auto|scipy-openblas32|system   where OpenBLAS comes from (default auto)
    TRAINMON_DEBUG=1                             -O0 -g3, asserts on
    TRAINMON_SANITIZE=address,undefined          compile and link with these sanitizers
    TRAINMON_COVERAGE=1                          compile and link for gcov
    TRAINMON_WERROR=1                            warnings are errors

Macros for the C code:
    TM_TIER             kernels only: baseline, avx2 or avx512, the tier that this object is compiled for
    TM_HAVE_X86_TIERS   all of _core, on x86-64 only: the objects of avx2 and avx512 exist
    TM_BLAS_HEADER      core only: <cblas.h>, so that tm_blas.c says `#include TM_BLAS_HEADER`
    TM_BLAS_PREFIX      core only: what stands before each BLAS and LAPACK symbol: scipy_ or nothing
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
LINUX = sys.platform.startswith("linux")


def switch(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def code(pattern: str, *folders: str) -> list[str]:
    """Files of csrc's folders, relative to the project as setuptools wants them."""
    found = [path for folder in folders for path in ROOT.glob(f"csrc/{folder}/{pattern}")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def stop(missing: str, debian: str, fedora: str, macos: str) -> None:
    """Ends the build with one sentence that says what to install."""
    sys.exit(
        f"trainmon cannot be built because {missing}: run `apt install {debian}` on Debian/Ubuntu,"
        f" `dnf install {fedora}` on Fedora/openEuler, or `{macos}` on macOS."
    )


SANITIZE = os.environ.get("TRAINMON_SANITIZE", "")
BLAS = os.environ.get("TRAINMON_BLAS", "auto")
# Objects of differently switched builds must never meet in one folder.
VARIANT = "-".join(
    filter(
        None,
        [
            BLAS,
            "debug" if switch("TRAINMON_DEBUG") else "",
            SANITIZE.replace(",", "-"),
            "coverage" if switch("TRAINMON_COVERAGE") else "",
        ],
    )
)

INSTRUMENT = [f"-fsanitize={SANITIZE}"] if SANITIZE else []
INSTRUMENT += ["--coverage"] if switch("TRAINMON_COVERAGE") else []
OPTIMIZE = ["-O0", "-g3", "-UNDEBUG"] if switch("TRAINMON_DEBUG") else ["-O3", "-g"]
CFLAGS = [
    "-std=c11",
    *OPTIMIZE,
    *INSTRUMENT,
    *(["-fno-omit-frame-pointer", "-fno-sanitize-recover=all"] if SANITIZE else []),
    "-fvisibility=hidden",
    "-ffp-contract=off",  # the results are promised bit for bit
    "-fno-math-errno",
    "-fno-lto",  # link-time inlining could move code of one ISA tier into another
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wconversion",
    "-Wno-sign-conversion",
    *(["-Werror"] if switch("TRAINMON_WERROR") else []),
]
LDFLAGS = [*INSTRUMENT, "-pthread", "-lm"]

AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mprfchw"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "vl", "bw", "dq")), "-mprefer-vector-width=512"]
X86 = platform.machine().lower() in ("x86_64", "amd64")
TIERS = {"baseline": [], "avx2": AVX2, "avx512": AVX512} if X86 else {"baseline": []}
MACROS = [("TM_HAVE_X86_TIERS", "1")] if X86 else []


def static_library(name: str, folder: str, macros: list, cflags: list[str]) -> tuple[str, dict]:
    return name, {
        "sources": code("*.c", folder),
        "macros": [*MACROS, *macros],
        # Not for the extensions: Python's slot tables hold functions as void *.
        "cflags": [*CFLAGS, "-Wpedantic", *cflags],
        "obj_deps": {"": code("*.h", "core", "kernels")},
    }


CORE_LIBRARY = static_library("trainmon_core", "core", [], [])
KERNEL_LIBRARIES = [
    static_library(f"trainmon_kernels_{tier}", "kernels", [("TM_TIER", tier)], flags)
    for tier, flags in TIERS.items()
]
CORE = Extension(
    "trainmon._core",
    code("*.c", "python"),
    define_macros=MACROS,
    extra_compile_args=list(CFLAGS),
    extra_link_args=list(LDFLAGS),
    depends=code("*.[ch]", "core", "kernels", "python"),
)
CONFIG = Extension(
    "trainmon._config",
    code("*.c", "yaml"),
    extra_compile_args=list(CFLAGS),
    extra_link_args=list(LDFLAGS),
    depends=code("*.h", "yaml"),
)


def pkg_config(*arguments: str) -> list[str] | None:
    """The flags that pkg-config prints, or None for a package it doesn't know."""
    program = shutil.which(os.environ.get("PKG_CONFIG", "pkg-config"))
    if program is None:
        stop("pkg-config is missing", "pkg-config", "pkgconf-pkg-config", "brew install pkgconf")
    answer = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    return shlex.split(answer.stdout) if answer.returncode == 0 else None


def check_compiler() -> None:
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if shutil.which(compiler) is None:
        stop(f"the C compiler `{compiler}` is missing", "gcc libc6-dev", "gcc", "xcode-select --install")
    include = sysconfig.get_path("include")
    if not Path(include, "Python.h").exists():
        stop("Python.h is missing", "python3-dev", "python3-devel", "brew install python")
    # As system headers: their own inline functions are not held to our warnings.
    CORE.extra_compile_args += ["-isystem", include]
    CONFIG.extra_compile_args += ["-isystem", include]


def use_numpy() -> None:
    if importlib.util.find_spec("numpy") is None:
        sys.exit("trainmon cannot be built because NumPy is missing: run `pip install 'numpy>=2'`.")
    import numpy

    CORE.extra_compile_args += ["-isystem", numpy.get_include()]


def use_libyaml() -> None:
    flags = pkg_config("--cflags", "yaml-0.1")
    if flags is None:
        stop("libyaml is missing", "libyaml-dev", "libyaml-devel", "brew install libyaml")
    CONFIG.extra_compile_args += flags
    CONFIG.extra_link_args += pkg_config("--libs", "yaml-0.1") or []


def use_openblas() -> Path | None:
    """Sets macros and flags for OpenBLAS; returns the folder of the libraries to carry along, if any."""
    if BLAS not in ("auto", "scipy-openblas32", "system"):
        sys.exit(f"TRAINMON_BLAS must be auto, scipy-openblas32 or system, not {BLAS!r}.")
    prefix, folder = "", None
    # macOS and others link the system's: the copied library would need its install names rewritten.
    if LINUX and BLAS != "system" and importlib.util.find_spec("scipy_openblas32"):
        import scipy_openblas32 as package

        prefix, folder = "scipy_", Path(package.get_lib_dir())
        cflags = [f"-I{package.get_include_dir()}"]
        libs = [f"-L{folder}", f"-l{package.get_library()}", "-Wl,-rpath,$ORIGIN/_libs"]
    elif BLAS == "scipy-openblas32":
        sys.exit(
            "trainmon cannot be built because scipy-openblas32 is missing: run `pip install scipy-openblas32`."
        )
    else:
        cflags, libs = pkg_config("--cflags", "openblas"), pkg_config("--libs", "openblas")
        if cflags is None or libs is None:
            stop("OpenBLAS is missing", "libopenblas-dev", "openblas-devel", "brew install openblas")
    CORE_LIBRARY[1]["cflags"] += cflags
    CORE_LIBRARY[1]["macros"] += [("TM_BLAS_HEADER", "<cblas.h>"), ("TM_BLAS_PREFIX", prefix)]
    CORE.extra_link_args += libs
    return folder


class BuildStaticLibraries(build_clib):
    """Finds what the build needs, then compiles each library in a folder of its own."""

    openblas_folder: Path | None = None

    def run(self) -> None:
        check_compiler()
        use_numpy()
        use_libyaml()
        self.openblas_folder = use_openblas()
        super().run()

    def build_libraries(self, libraries: list) -> None:
        # The tiers share their sources, hence the names of their objects.
        temp = self.build_temp
        for library in libraries:
            self.build_temp = os.path.join(temp, library[0])
            super().build_libraries([library])
        self.build_temp = temp


class BuildExtensions(build_ext):
    """Builds the static libraries first, also in place, and carries OpenBLAS into the package."""

    def run(self) -> None:
        self.run_command("build_clib")
        super().run()
        self.carry_openblas()

    def build_extensions(self) -> None:
        # A Python of one's own adds its folder, where a library of the same name would win over ours.
        linker = self.compiler.linker_so
        self.compiler.linker_so = [flag for flag in linker if not flag.startswith("-Wl,-rpath")]
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:
        # Always, not only what is newer: the one in place may be a later build with other switches.
        force, self.force = self.force, True
        super().copy_extensions_to_source()
        self.force = force

    def carry_openblas(self) -> None:
        folder = self.get_finalized_command("build_clib").openblas_folder
        if folder is not None:
            package = ROOT / "trainmon" if self.inplace else Path(self.build_lib, "trainmon")
            self.mkpath(str(package / "_libs"))
            for library in folder.glob("*.so*"):
                self.copy_file(str(library), str(package / "_libs" / library.name))


setup(
    libraries=[CORE_LIBRARY, *KERNEL_LIBRARIES],
    ext_modules=[CONFIG, CORE],
    cmdclass={"build_clib": BuildStaticLibraries, "build_ext": BuildExtensions},
    options={"build": {"build_base": os.path.join("build", VARIANT)}},
)
