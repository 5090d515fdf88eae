"""Makes installed plugin distributions out of source text, for tests."""

from __future__ import annotations

import pathlib
import re
import textwrap

__all__ = ["distribution"]


def distribution(
    folder: pathlib.Path, name: str, sources: dict[str, str], version: str = "1.0"
) -> pathlib.Path:
    """Write a distribution into `folder`, as an installer would leave it there.

    `sources` maps entry-point names to the source of the module that each leads to; a name as
    ``point=module:attribute`` says where it leads.
    """
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = []
    for key, source in sources.items():
        point, _, value = key.partition("=")
        value = value or re.sub(r"\W", "_", f"{name}_{point}")
        points.append(f"{point} = {value}")
        (folder / f"{value.partition(':')[0]}.py").write_text(textwrap.dedent(source))
    (metadata / "entry_points.txt").write_text("\n".join(["[mpicoll.plugins]", *points, ""]))
    return folder
