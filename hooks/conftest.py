"""The tests of the plugins start jobs as those of mpicoll do."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "launch"))
