"""The harness of ``tests/spmd`` (every rank runs every test, in step) for processes of their own.

mpiexec -n 2 python -m pytest tests/gpu
"""

import importlib.util
from pathlib import Path

import pytest
import torch

_SPMD = Path(__file__).resolve().parents[1] / "spmd" / "conftest.py"
_spec = importlib.util.spec_from_file_location("mpicoll_tests_in_step", _SPMD)
_harness = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_harness)
globals().update(
    {name: value for name, value in vars(_harness).items() if not name.startswith("__")}
)


def pytest_sessionfinish(session, exitstatus):
    """Without a device everything is skipped, which is no failure."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and not torch.cuda.is_available():
        session.exitstatus = pytest.ExitCode.OK
