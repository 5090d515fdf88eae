"""Configuration of the documentation. Build it with ``python -m tox run -e docs``."""

import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

import inventories  # noqa: E402

project = "mpicoll"
author = "The mpicoll developers"
copyright = "The mpicoll developers"
release = version = installed_version("mpicoll")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "numpydoc",
    "operations",
    "completeness",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"mpicoll {release}"

autodoc_typehints = "none"  # the docstrings say the types
autodoc_member_order = "bysource"
numpydoc_show_class_members = False

# The inventories list what these pages refer to, so that a build needs no network and gives the
# same result everywhere. MPICOLL_DOCS_ONLINE=1 fetches the complete ones instead.
intersphinx_mapping = {
    name: (
        url,
        None if os.environ.get("MPICOLL_DOCS_ONLINE") == "1" else inventories.compiled(name),
    )
    for name, url in {
        "python": "https://docs.python.org/3/",
        "torch": "https://docs.pytorch.org/docs/stable/",
        "mpi4py": "https://mpi4py.readthedocs.io/en/stable/",
    }.items()
}

# What the extension "completeness" holds the pages to.
public_modules = ["mpicoll", "mpicoll.nn.functional", "mpicoll.algorithms", "mpicoll.plugins"]
