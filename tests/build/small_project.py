"""A project of four short C files under the real setup.py, so that tests of the build take a second each.

Its extension reports what each translation unit was compiled as.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

KERNEL_H = """
#define VALUE 1
#define PASTE2(a, b) a##b
#define PASTE(a, b) PASTE2(a, b)
int kernel_baseline(void);
int kernel_avx2(void);
int kernel_avx512(void);
"""

KERNEL_C = """
#include "kernel.h"
int PASTE(kernel_, TM_TIER)(void) {
#if defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512F__)
    return 512 * VALUE;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    return 2 * VALUE;
#else
    return VALUE;
#endif
}
"""

CORE_C = """
#include TM_BLAS_HEADER
#include "../kernels/kernel.h"
#define BLAS(name) PASTE(TM_BLAS_PREFIX, name)
int core_value = 7;
int core_optimized =
#ifdef __OPTIMIZE__
    1;
#else
    0;
#endif
int core_tier(int tier);
const char *core_blas(void);
const char *core_blas(void) {
    return BLAS(openblas_get_config)();
}
int core_tier(int tier) {
#ifdef TM_HAVE_X86_TIERS
    return tier == 0 ? kernel_baseline() : tier == 1 ? kernel_avx2() : kernel_avx512();
#else
    return tier == 0 ? kernel_baseline() : 0;
#endif
}
"""

MODULE_C = """
#include <Python.h>
#define MORE
extern int core_value, core_optimized;
int core_tier(int tier);
const char *core_blas(void);
static PyObject *report(PyObject *self, PyObject *unused) {
    (void)self;
    (void)unused;
    return Py_BuildValue("{s:i,s:i,s:(iii),s:s}", "core", core_value, "optimized", core_optimized, "tiers",
                         core_tier(0), core_tier(1), core_tier(2), "blas", core_blas());
}
static PyMethodDef methods[] = {{"report", report, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_core", .m_methods = methods};
PyMODINIT_FUNC PyInit__core(void) {
    return PyModule_Create(&definition);
}
"""

CONFIG_C = """
#include <Python.h>
#include <yaml.h>
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_config"};
PyMODINIT_FUNC PyInit__config(void) {
    return yaml_get_version_string() ? PyModule_Create(&definition) : NULL;
}
"""

FILES = {
    "csrc/kernels/kernel.h": KERNEL_H,
    "csrc/kernels/kernel.c": KERNEL_C,
    "csrc/core/core.c": CORE_C,
    "csrc/python/module.c": MODULE_C,
    "csrc/yaml/config.c": CONFIG_C,
    "trainmon/__init__.py": "",
    "README.md": "",
}


class SmallProject:
    """The project in a folder; `build` runs setup.py in place, `report` asks the extension."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in FILES.items():
            folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
            folder.joinpath(name).write_text(text, encoding="utf-8")
        for name in ("setup.py", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)

    def replace(self, name: str, old: str, new: str) -> None:
        path = self.folder / name
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TRAINMON_")}
        return subprocess.run(
            [sys.executable, *command],
            cwd=self.folder,
            env=clean | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    def build(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("setup.py", "-q", "build_ext", "--inplace", **environment)

    def report(self, **environment: str) -> dict[str, object]:
        """Builds, then loads both extensions in a fresh interpreter."""
        built = self.build(**environment)
        assert built.returncode == 0, built.stderr
        code = "import trainmon._config, trainmon._core as core; print(repr(core.report()))"
        answer = self.run("-c", code)
        assert answer.returncode == 0, answer.stderr
        result = ast.literal_eval(answer.stdout)
        assert isinstance(result, dict)
        return result
