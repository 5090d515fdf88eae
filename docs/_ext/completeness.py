"""Checks that a complete manual passes; each failure is a warning, which ends a ``-W`` build.

* Every public name of every public module that exists is documented.
* Every script that a page shows is listed in ``scripts.txt``, whose scripts the tests run.
* No page has Python code of its own, which no test would run.
"""

from importlib import import_module
from importlib.util import find_spec
from inspect import ismodule
from pathlib import Path

from sphinx.util import logging

logger = logging.getLogger(__name__)


def exists(module):
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def names_of(module, name):
    """Yield the full names under which a page may describe ``name`` of ``module``."""
    value = getattr(module, name)
    yield f"{module.__name__}.{name}"
    yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def check_names(app):
    documented = set(app.env.get_domain("py").objects)
    for module in map(import_module, filter(exists, app.config.public_modules)):
        if not hasattr(module, "__all__"):
            logger.warning("%s does not say what is public in it: no __all__", module.__name__)
            continue
        for name in module.__all__:
            if not ismodule(getattr(module, name)) and documented.isdisjoint(
                names_of(module, name)
            ):
                logger.warning("%s.%s is public but not documented", module.__name__, name)


def check_scripts(app):
    source = Path(app.srcdir)
    lines = (source / "scripts.txt").read_text().splitlines()
    listed = {line for line in lines if line and not line.startswith("#")}
    for script in sorted(listed):
        if not (source.parent / script).is_file():
            logger.warning("scripts.txt lists %s, which does not exist", script)
    for page in app.env.found_docs:
        for shown in app.env.dependencies[page]:
            path = (source / shown).resolve()
            if path.suffix == ".py" and path.is_relative_to(source.parent):
                script = path.relative_to(source.parent).as_posix()
                if script.startswith(("examples/", "docs/")) and script not in listed:
                    logger.warning("shows %s, which scripts.txt lacks", script, location=page)
        if ".. code-block:: python" in Path(app.env.doc2path(page)).read_text():
            logger.warning("has Python code that no test runs", location=page)


def check(app, env):
    check_names(app)
    check_scripts(app)


def setup(app):
    app.add_config_value("public_modules", [], "env", [list])
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True}
