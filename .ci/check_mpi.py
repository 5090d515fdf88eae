"""Say what is about to be tested; fail when that is not what the environment is for.

usage: mpiexec -n 2 python .ci/check_mpi.py [--library NAME] [first words of the MPI's version]
"""

import argparse
import os
import sys
from importlib.metadata import version

from mpi4py import MPI

import mpicoll

parser = argparse.ArgumentParser()
parser.add_argument("--library", default="libmpi", help="how the library's file name starts")
parser.add_argument("version", nargs="*", help="the words its version string starts with")
args = parser.parse_args()

world = MPI.COMM_WORLD
expected = " ".join(args.version)
found = " ".join(MPI.Get_library_version().rstrip("\0").split())
name = found[:40].strip()
with open("/proc/self/maps") as maps:
    mapped = {line.split()[-1] for line in maps}
loaded = sorted(path for path in mapped if os.path.basename(path).startswith("libmpi"))

problems = []
if not found.startswith(expected):
    problems.append(f"expected {expected!r}, but mpi4py has loaded {name!r}")
if not any(os.path.basename(path).startswith(args.library) for path in loaded):
    problems.append(f"expected the library {args.library}, but these are loaded: {loaded}")
if world.size != 2:
    problems.append(f"{world.size} rank instead of 2: mpiexec does not belong to {name!r}")
if not os.path.realpath(mpicoll.__file__).startswith(os.path.realpath(sys.prefix)):
    problems.append(f"mpicoll is taken from {mpicoll.__file__}, not from this environment")
if problems:
    sys.exit("check_mpi: " + "; ".join(problems))

if world.rank == 0:
    packages = ("torch", "mpi4py", "numpy", "pluggy")
    print(f"MPI: {name}, {', '.join(loaded)}")
    print(f"Python {sys.version.split()[0]}:", *(f"{p} {version(p)}" for p in packages))
