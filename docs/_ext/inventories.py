"""Intersphinx inventories kept as text: one line per object, ``name domain:role uri``."""

import zlib
from pathlib import Path

DOCS = Path(__file__).parent.parent


def compiled(name):
    """Return the path of the binary inventory made from ``_inventories/<name>.txt``."""
    lines = [
        "{} {} 1 {} -".format(*line.split())
        for line in (DOCS / "_inventories" / f"{name}.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    header = (
        "# Sphinx inventory version 2\n"
        f"# Project: {name}\n"
        "# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    target = DOCS / "_build" / "inventories" / f"{name}.inv"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(header.encode() + zlib.compress("\n".join(lines).encode() + b"\n"))
    return str(target)
