"""Every script that the documentation shows runs: the examples on 1 to 4 ranks, the others on 3.

The documentation's own environment runs all of them on 2.
"""

from __future__ import annotations

import pytest
from launcher import ROOT, script

LISTED = [
    line
    for line in (ROOT / "docs" / "scripts.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def test_every_script_is_listed():
    there = {
        str(path.relative_to(ROOT))
        for folder in ("examples", "docs/scripts")
        for path in (ROOT / folder).glob("*.py")
    }
    assert there == set(LISTED)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        (name, ranks)
        for name in LISTED
        for ranks in ((1, 2, 3, 4) if name.startswith("examples/") else (3,))
    ],
)
def test_script(name, ranks):
    script(ROOT / name, ranks).check()
