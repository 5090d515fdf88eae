"""The directives ``operations-table`` and ``reductions-table``, filled from ``mpicoll.ops``."""

import abc
import re

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from mpicoll.ops import OPERATIONS, REDUCTIONS


def formula(text):
    """Return ``text`` with ``a_b`` and ``a_{bc}`` set as subscripts."""
    return re.sub(r"(?<=\w)_(?:\{([^}]*)\}|(\w+))", r"\\ :sub:`\1\2`\\ ", text)


class Table(SphinxDirective, abc.ABC):
    """A table with one row per entry; cells are reStructuredText."""

    columns: tuple[tuple[str, int], ...]

    @abc.abstractmethod
    def rows(self):
        """The cells of every row."""

    def run(self):
        table = nodes.table()
        group = nodes.tgroup(cols=len(self.columns))
        table += group
        group += [nodes.colspec(colwidth=width) for _, width in self.columns]
        head = nodes.thead()
        head += self.row([title for title, _ in self.columns])
        body = nodes.tbody()
        body += [self.row(cells) for cells in self.rows()]
        group += [head, body]
        return [table]

    def row(self, cells):
        row = nodes.row()
        for cell in cells:
            entry = nodes.entry()
            self.state.nested_parse(StringList([cell], source=__file__), 0, entry)
            row += entry
        return row


class OperationsTable(Table):
    columns = (("Method", 16), ("Function", 16), ("MPI", 16), ("What it does", 30), ("Adjoint", 22))

    def rows(self):
        for row in OPERATIONS.values():
            method = f":meth:`~mpicoll.Communicator.{row.name}`"
            if row.inplace:
                method += f", :meth:`~mpicoll.Communicator.{row.name}_`"
            functional = (
                f":func:`~mpicoll.nn.functional.{row.functional}`" if row.functional else ""
            )
            yield (
                method,
                functional,
                f"{row.mpi} ({row.section})",
                row.summary,
                formula(row.adjoint),
            )


class ReductionsTable(Table):
    columns = (("Reduction", 14), ("Value", 8), ("MPI", 16), ("Takes", 30), ("Adjoint", 32))

    def rows(self):
        for row in REDUCTIONS.values():
            yield f"``{row.name}``", str(row.value), row.mpi or "", row.dtypes, formula(row.adjoint)


def setup(app):
    app.add_directive("operations-table", OperationsTable)
    app.add_directive("reductions-table", ReductionsTable)
    return {"parallel_read_safe": True}
