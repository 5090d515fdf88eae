"""Replace mpi4py's wheel, which serves two ABIs, by a build with the compiler that MPICC names."""

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

package = Path(find_spec("mpi4py").origin).parent
if any(package.glob("MPI.mpich.*")):  # the wheel has one extension per ABI, a build has MPI.*.so
    # Without pip's cache, which would hand this build to environments with another MPI.
    pip = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--no-deps"]
    source = ["--force-reinstall", "--no-binary=mpi4py", f"mpi4py=={version('mpi4py')}"]
    subprocess.run([*pip, *source], check=True)
