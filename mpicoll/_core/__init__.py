"""Addresses, counts, MPI handles and requests; the GIL is released; knows nothing of autograd."""

from importlib.util import find_spec

if find_spec(f"{__name__}.mpi") is None:
    raise ImportError(
        f"mpicoll is imported from {__path__[0].removesuffix('/_core')}, the folder of its "
        "sources, where it has not been compiled: start Python in another folder, run the command "
        "`mpicoll` in place of `python -m mpicoll`, or install with `pip install -e .`"
    )
