"""Build the Cython core. Needs a C compiler; no MPI, no mpi.h, no torch headers."""

import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

CORE = Path("mpicoll/_core")
sys.path.insert(0, str(CORE.resolve()))
import api_gen  # noqa: E402

api_gen.write(CORE)

SOURCES = {
    "mpi": ["reductions.c", "shared.c"],
    "buffers": ["pool.c"],
    "collectives": ["reductions.c", "shared.c"],
    "nonblocking": ["reductions.c"],
    "point_to_point": [],
}
HEADERS = [
    "mpi_api.h",
    "mpi_load.h",
    "dlpack.h",
    "pool.h",
    "reductions.h",
    "shared.h",
    "api_functions.txt",
]

extensions = [
    Extension(
        f"mpicoll._core.{name}",
        [str(CORE / f"{name}.pyx"), *(str(CORE / source) for source in extra)],
        include_dirs=[str(CORE)],
        depends=[str(CORE / header) for header in HEADERS],
        # Results must not depend on whether the compiler fuses multiply and add.
        extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off", "-Wno-unused-function"],
    )
    for name, extra in SOURCES.items()
]

setup(
    ext_modules=cythonize(
        extensions,
        language_level=3,
        compiler_directives={"embedsignature": True, "boundscheck": False, "wraparound": False},
    )
)
