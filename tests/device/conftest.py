"""The harness of ``tests/spmd`` (every rank runs every test, in step) for processes of their own.

mpiexec -n 2 python -m pytest tests/device
"""

import importlib.util
from pathlib import Path

_SPMD = Path(__file__).resolve().parents[1] / "spmd" / "conftest.py"
_spec = importlib.util.spec_from_file_location("mpicoll_tests_in_step", _SPMD)
_harness = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_harness)
globals().update(
    {name: value for name, value in vars(_harness).items() if not name.startswith("__")}
)
