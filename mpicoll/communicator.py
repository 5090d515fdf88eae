"""Communicators: MPI's words for differentiable communication."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from . import config, failure, lifetime, watch
from ._core import buffers, collectives, mpi
from .arguments import (
    as_axis,
    as_numelem,
    as_peer,
    as_reduction,
    as_root,
    as_tag,
    check_reducible,
)
from .autograd import apply, apply_inplace, needs_graph, require_derivative, transforms
from .autograd import point_to_point as messages
from .autograd.point_to_point import WaitHandle
from .dispatch import CODES, USER, Call
from .negotiate import exchange_rows, require_alike, require_number, require_sum
from .ops import OPERATIONS, ReduceOp
from .staging import check_tensor, check_writable, name_of, overlap

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "COMM_SELF",
    "COMM_WORLD",
    "Communicator",
    "as_communicator",
    "comm_from_mpi4py",
]

_express = collectives.express
_ALLREDUCE = CODES["Allreduce"]
_MESSAGE = "a message between two ranks has no neutral element, and the other may have left"


class Communicator:
    """A group of ranks that communicate, with differentiable operations.

    Made from :data:`COMM_WORLD`, :func:`comm_from_mpi4py`, :meth:`Split` or :meth:`Dup`, not by
    calling the class.

    Notes
    -----
    Gradients follow L = the sum of the losses of all ranks: ``backward()`` on rank r supplies
    ∂L/∂y_r, and every operation returns ∂L/∂x_r, the true adjoint of the map from all ranks'
    inputs to all ranks' results. Every rank that called an operation must let its node run in
    backward.

    User, backward and control traffic travel on communicators of their own, duplicated when the
    communicator is made. For the world this happens at its first use, which is therefore
    collective.
    """

    def __init__(self, source: Callable[[], tuple[Any, bool]], name: str) -> None:
        self._source = source
        self._name = name
        self._made: mpi.Comm | None = None
        self._owned = False
        self._children = 0
        self._dropped: dict[int, lifetime.Remains] = {}
        self._finalizer: weakref.finalize | None = None

    # ------------------------------------------------------------ life

    @property
    def _comm(self) -> mpi.Comm:
        """The core communicator; made at the first use."""
        return self._made if self._made is not None else self._make()

    def _make(self) -> mpi.Comm:
        mpi.bind()
        failure.watch_this_rank()
        watch.require_unobserved()  # making the channels is collective
        watch.first_use()
        settings = config.read()
        if settings.chunk_bytes is not None:
            mpi.limits(chunk_bytes=settings.chunk_bytes)
        if settings.pool_bytes is not None:
            buffers.pool(settings.pool_bytes)
        base, owned = self._source()
        made = lifetime.with_channels(base, owned, settings.shared_bytes)
        self._made, self._owned = made, owned
        return made

    def _child(self, base: MPI.Comm, name: str, kept: bool = False) -> Communicator:
        child = Communicator(lambda: (base, True), name)
        comm = child._comm
        remains = lifetime.Remains(base, comm.channels, name, child._dropped)
        # Watches the core: nodes of a graph may need it longer than the user does.
        drop = lifetime.keep if kept else lifetime.drop
        child._finalizer = weakref.finalize(comm, drop, self._dropped, self._children, remains)
        child._finalizer.atexit = False
        return child

    def _bury(self, call: str) -> None:
        """Free the children that were dropped on every rank. Collective; the start of `call`."""
        if watch.on:
            watch.refuse(self._comm, call, "it needs all ranks; call it before the context")
        self._children += 1  # the number of what is made next, on every rank
        lifetime.bury(self._comm, self._dropped)

    def Free(self) -> None:
        """Free the communicator. Collective; using it afterwards raises ``ValueError``.

        Notes
        -----
        For a communicator of :func:`comm_from_mpi4py` the ``mpi4py`` communicator stays; only
        what mpicoll made beside it is freed. ``COMM_WORLD`` and ``COMM_SELF`` cannot be freed.

        Raises
        ------
        ValueError
            It is one of the predefined communicators, or has been freed already.

        References
        ----------
        MPI-4.1, section 7.4.3.
        """
        if self in (COMM_WORLD, COMM_SELF):
            raise ValueError(f"Free: {self._name} is predefined and cannot be freed")
        comm = self._comm
        if comm.freed:
            raise ValueError(f"Free: {self._name} has been freed already")
        if self._finalizer is not None:
            self._finalizer.detach()
        self._bury("Free")
        lifetime.report_unanswered(comm, self._name)
        comm.free()
        if self._owned:
            comm.base.Free()

    def __repr__(self) -> str:
        if self._made is None:
            return f"<mpicoll.Communicator {self._name}, not used yet>"
        if self._made.freed:
            return f"<mpicoll.Communicator {self._name}, freed>"
        return f"<mpicoll.Communicator {self._name}, rank {self._made.rank} of {self._made.size}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self  # a copy of a module communicates on the same communicator

    def __reduce__(self):
        if self in (COMM_WORLD, COMM_SELF):
            return self._name  # the global of that name
        raise TypeError(f"{self!r} lives in this process and cannot be pickled")

    @property
    def rank(self) -> int:
        """Rank of this process in the communicator."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._comm.size

    def to_mpi4py(self) -> MPI.Comm:
        """The ``mpi4py`` communicator with the same MPI handle.

        Returns
        -------
        mpi4py.MPI.Comm
            It is shared, not a copy: do not free it.
        """
        comm = self._comm
        if comm.freed:
            raise ValueError(f"to_mpi4py: {self._name} has been freed")
        return comm.base

    def Dup(self) -> Communicator:
        """A new communicator with the same ranks. Collective.

        References
        ----------
        MPI-4.1, section 7.4.2.
        """
        base = self.to_mpi4py()
        self._bury("Dup")
        return self._child(base.Dup(), f"Dup of {self._name}")

    def _private(self, owner: str) -> Communicator:
        """A duplicate for an object of mpicoll, freed after it without a warning. Collective."""
        base = self.to_mpi4py()
        self._bury(owner)
        return self._child(base.Dup(), f"that of a {owner} on {self._name}", kept=True)

    def Split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Part the ranks into new communicators. Collective.

        Parameters
        ----------
        color
            Ranks with the same non-negative color come into one communicator; None: into none.
        key
            Order of the ranks in it; ties by rank here.

        Returns
        -------
        Communicator or None
            None on a rank with color None.

        Raises
        ------
        TypeError, ValueError
            `color` or `key` is not an integer, or `color` is negative.

        References
        ----------
        MPI-4.1, section 7.4.2.
        """
        from mpi4py import MPI

        if color is not None:
            color = as_numelem("Split", "color", color)
        key = _index("Split", "key", key)
        for name, value in (("color", color or 0), ("key", key)):
            if not -(1 << 31) <= value < 1 << 31:
                raise ValueError(f"Split: {name} is {value}; it must fit 32 bits")
        base = self.to_mpi4py()
        self._bury("Split")
        part = base.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        return self._child(part, f"part {color} of {self._name}")

    def Barrier(self) -> None:
        """Wait until every rank of the communicator has come here.

        References
        ----------
        MPI-4.1, section 6.3.
        """
        comm = self._comm
        if watch.on:
            watch.barrier(comm, lambda: collectives.barrier(comm))
        else:
            collectives.barrier(comm)

    # ------------------------------------------------------------ reductions

    def Allreduce(self, tensor: torch.Tensor, op: ReduceOp | int = ReduceOp.SUM) -> torch.Tensor:
        """Combine the tensors of all ranks; every rank gets the result.

        Parameters
        ----------
        tensor
            Same shape and dtype on every rank, any layout.
        op
            The reduction, the same on every rank.

        Returns
        -------
        torch.Tensor
            A new contiguous tensor of the same shape, equal on all ranks bit for bit.

        Raises
        ------
        TypeError
            `tensor` is not a strided tensor, or `op` does not take its dtype.
        ValueError
            `op` names no reduction.
        RuntimeError
            `tensor` requires grad and `op` has no gradient (logical, bitwise).
        MPIError
            The MPI call failed.

        Notes
        -----
        **Adjoint**: with G = Σ_s g_s, SUM: G; AVG: G / W; MAX, MIN: G · 1[x_r = y] / (number of
        ranks with x_s = y); PROD: G · Π_{s≠r} x_s.

        float16 and bfloat16 are added and multiplied in float32, in rank order, and rounded once.

        References
        ----------
        MPI-4.1, section 6.9.6.

        Examples
        --------
        >>> y = mpicoll.COMM_WORLD.Allreduce(torch.ones(3), mpicoll.MPI_SUM)
        """
        comm = self._made
        if comm is not None and type(op) is ReduceOp:
            result = _express(comm, _ALLREDUCE, tensor, op, 0)
            if result is not None:
                return result
        return self._reduce("Allreduce", tensor, op)

    def _combine(self, name: str, tensor: torch.Tensor, op: Any, root: Any = 0) -> torch.Tensor:
        comm = self._made
        if comm is not None and type(op) is ReduceOp:
            result = _express(comm, CODES[name], tensor, op, root)
            if result is not None:
                return result
        return self._reduce(name, tensor, op, root)

    def _reduce(
        self, name: str, tensor: torch.Tensor, op: Any, root: Any = None, inplace: bool = False
    ) -> torch.Tensor:
        row = OPERATIONS[name]
        shown = name + "_" if inplace else name
        comm = self._comm
        check_tensor(shown, "tensor", tensor)
        reduction = as_reduction(shown, op)
        check_reducible(shown, reduction, tensor, row.prefix)
        rooted = "root" in row.arguments
        where = as_root(shown, "root", root, comm.size) if rooted else -1
        call = Call(row, comm, op=reduction, root=where, inplace=inplace)
        if inplace:
            check_writable(shown, "tensor", tensor)
            return apply_inplace(call, tensor, shown)
        return apply(call, tensor)

    def Reduce(
        self, tensor: torch.Tensor, op: ReduceOp | int = ReduceOp.SUM, root: int = 0
    ) -> torch.Tensor:
        """Combine the tensors of all ranks on the root.

        Parameters
        ----------
        tensor
            Same shape and dtype on every rank, any layout.
        op
            The reduction, the same on every rank.
        root
            The rank that gets the result.

        Returns
        -------
        torch.Tensor
            A new contiguous tensor: the result on the root, zeros elsewhere.

        Raises
        ------
        TypeError, ValueError, RuntimeError, MPIError
            As for :meth:`Allreduce`; `root` is no rank of the communicator (``ValueError``).

        Notes
        -----
        **Adjoint**: that of :meth:`Allreduce` with G = g_root; gradients elsewhere do not count.

        References
        ----------
        MPI-4.1, section 6.9.1.
        """
        return self._combine("Reduce", tensor, op, root)

    def Reduce_(self, tensor: torch.Tensor, op: ReduceOp | int, root: int) -> torch.Tensor:
        """Combine the tensors of all ranks on the root, in place.

        Parameters
        ----------
        tensor
            Same shape and dtype on every rank. On the root it is overwritten with the result,
            elsewhere with zeros. A non-leaf must not be used again in the graph.
        op
            The reduction, the same on every rank.
        root
            The rank that gets the result.

        Returns
        -------
        torch.Tensor
            Shares the storage of `tensor`. Off the root it is zero and serves as a dummy.

        Raises
        ------
        TypeError, ValueError, RuntimeError, MPIError
            As for :meth:`Reduce`; `tensor` is expanded, so that it cannot be written
            (``ValueError``).

        Notes
        -----
        **Adjoint**: as for :meth:`Reduce`.

        References
        ----------
        MPI-4.1, section 6.9.1.
        """
        return self._reduce("Reduce", tensor, op, root, inplace=True)

    def Reduce_scatter(
        self,
        tensor: torch.Tensor,
        scatteraxis: int,
        numelem: int,
        op: ReduceOp | int = ReduceOp.SUM,
    ) -> torch.Tensor:
        """Combine the tensors of all ranks and hand out the pieces.

        Parameters
        ----------
        tensor
            Same shape and dtype on every rank, any layout.
        scatteraxis
            The axis that is cut; may be negative. The same on every rank.
        numelem
            How much of that axis this rank keeps; may differ between ranks. All ranks' numbers
            add up to the size of the axis.
        op
            The reduction, the same on every rank.

        Returns
        -------
        torch.Tensor
            A new contiguous tensor with `numelem` elements along `scatteraxis`.

        Raises
        ------
        TypeError, ValueError, RuntimeError, MPIError
            As for :meth:`Allreduce`. The ranks' shapes differ or the numbers do not add up:
            ``ValueError`` on all ranks.
        IndexError
            `tensor` has no such axis.

        Notes
        -----
        **Adjoint**: SUM: the concatenation of all g_s (an Allgather); the other reductions as in
        :meth:`Allreduce` with that as G.

        References
        ----------
        MPI-4.1, section 6.10.
        """
        comm = self._comm
        check_tensor("Reduce_scatter", "tensor", tensor)
        reduction = as_reduction("Reduce_scatter", op)
        check_reducible("Reduce_scatter", reduction, tensor)
        axis = as_axis("Reduce_scatter", "scatteraxis", scatteraxis, tensor.dim())
        if reduction in (ReduceOp.MINLOC, ReduceOp.MAXLOC) and axis == tensor.dim() - 1:
            raise ValueError(
                f"Reduce_scatter: scatteraxis {scatteraxis} would cut the pairs of "
                f"{reduction.name} apart"
            )
        mine = as_numelem("Reduce_scatter", "numelem", numelem)
        if needs_graph(tensor):  # refused before the sizes are exchanged
            call = Call(OPERATIONS["Reduce_scatter"], comm, op=reduction)
            require_derivative(call, "Reduce_scatter", tensor.dtype)
        rows = exchange_rows("Reduce_scatter", comm, USER, tensor, (axis, int(reduction), mine))
        require_alike("Reduce_scatter", comm, rows, ("scatteraxis", "op"))
        scattered = [row.numbers[2] for row in rows]
        require_sum("Reduce_scatter", comm, scattered, tensor.shape[axis], axis)
        call = Call(
            OPERATIONS["Reduce_scatter"],
            comm,
            op=reduction,
            scatteraxis=axis,
            scattered=scattered,
            staged=any(row.staged for row in rows),
        )
        return apply(call, tensor)

    def Scan(self, tensor: torch.Tensor, op: ReduceOp | int = ReduceOp.SUM) -> torch.Tensor:
        """Combine the tensors of the ranks up to and including this one.

        Parameters
        ----------
        tensor
            Same shape and dtype on every rank, any layout.
        op
            The reduction, the same on every rank; not AVG.

        Returns
        -------
        torch.Tensor
            A new contiguous tensor of the same shape.

        Raises
        ------
        TypeError, ValueError, MPIError
            As for :meth:`Allreduce`.
        RuntimeError
            `tensor` requires grad and `op` is not SUM.

        Notes
        -----
        **Adjoint**: SUM: dx_r = Σ_{s≥r} g_s, the same scan from the last rank down.

        References
        ----------
        MPI-4.1, section 6.11.1.
        """
        return self._combine("Scan", tensor, op)

    def Exscan(self, tensor: torch.Tensor, op: ReduceOp | int = ReduceOp.SUM) -> torch.Tensor:
        """Combine the tensors of the ranks before this one.

        Parameters
        ----------
        tensor
            Same shape and dtype on every rank, any layout.
        op
            The reduction, the same on every rank; not AVG.

        Returns
        -------
        torch.Tensor
            A new contiguous tensor of the same shape; on rank 0 the neutral element of `op`.

        Raises
        ------
        TypeError, ValueError, MPIError
            As for :meth:`Allreduce`.
        RuntimeError
            `tensor` requires grad and `op` is not SUM.

        Notes
        -----
        **Adjoint**: SUM: dx_r = Σ_{s>r} g_s.

        References
        ----------
        MPI-4.1, section 6.11.2.
        """
        return self._combine("Exscan", tensor, op)

    # ------------------------------------------------------------ moving data

    def Bcast(self, tensor: torch.Tensor, root: int = 0) -> torch.Tensor:
        """Copy the root's tensor to every rank.

        Parameters
        ----------
        tensor
            Same shape and dtype on every rank; its values count only at the root.
        root
            The rank whose values are sent.

        Returns
        -------
        torch.Tensor
            A new contiguous tensor with the root's values.

        Raises
        ------
        TypeError, ValueError, MPIError
            As for :meth:`Reduce`.

        Notes
        -----
        **Adjoint**: dx_root = Σ_s g_s, zeros elsewhere.

        References
        ----------
        MPI-4.1, section 6.4.
        """
        return self._bcast(tensor, root, False)

    def Bcast_(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Copy the root's tensor to every rank, in place.

        Parameters
        ----------
        tensor
            Same shape and dtype on every rank; overwritten with the root's values, also where it
            is not contiguous. A non-leaf must not be used again in the graph.
        root
            The rank whose values are sent.

        Returns
        -------
        torch.Tensor
            Shares the storage of `tensor`.

        Raises
        ------
        TypeError, ValueError, MPIError
            As for :meth:`Reduce_`.

        Notes
        -----
        **Adjoint**: dx_root = Σ_s g_s, zeros elsewhere.

        References
        ----------
        MPI-4.1, section 6.4.
        """
        return self._bcast(tensor, root, True)

    def _bcast(self, tensor: torch.Tensor, root: Any, inplace: bool) -> torch.Tensor:
        shown = "Bcast_" if inplace else "Bcast"
        comm = self._comm
        if not inplace:
            result = _express(comm, CODES["Bcast"], tensor, -1, root)
            if result is not None:
                return result
        check_tensor(shown, "tensor", tensor)
        where = as_root(shown, "root", root, comm.size)
        call = Call(OPERATIONS["Bcast"], comm, root=where, inplace=inplace)
        if inplace:
            check_writable(shown, "tensor", tensor)
            return apply_inplace(call, tensor, shown)
        return apply(call, tensor)

    def Gather(self, tensor: torch.Tensor, gatheraxis: int, root: int) -> torch.Tensor:
        """Concatenate the tensors of all ranks on the root.

        Parameters
        ----------
        tensor
            Sizes may differ between ranks along `gatheraxis` only.
        gatheraxis
            The axis along which they are concatenated; may be negative. The same on every rank.
        root
            The rank that gets the result.

        Returns
        -------
        torch.Tensor
            Root: the concatenation in rank order. Elsewhere: size 0 along `gatheraxis`.

        Raises
        ------
        TypeError
            `tensor` is not a strided tensor. The ranks' dtypes differ: on all ranks.
        ValueError
            `root` is no rank. The ranks' shapes, axes or roots do not fit: on all ranks.
        IndexError
            `tensor` has no such axis.
        MPIError
            The MPI call failed.

        Notes
        -----
        **Adjoint**: dx_r = rank r's block of g_root (a Scatter).

        References
        ----------
        MPI-4.1, section 6.5.
        """
        return self._gather("Gather", tensor, gatheraxis, root)

    def Allgather(self, tensor: torch.Tensor, gatheraxis: int) -> torch.Tensor:
        """Concatenate the tensors of all ranks on every rank.

        Parameters
        ----------
        tensor
            Sizes may differ between ranks along `gatheraxis` only.
        gatheraxis
            The axis along which they are concatenated; may be negative. The same on every rank.

        Returns
        -------
        torch.Tensor
            The concatenation in rank order.

        Raises
        ------
        TypeError, ValueError, IndexError, MPIError
            As for :meth:`Gather`.

        Notes
        -----
        **Adjoint**: dx_r = Σ_s (rank r's block of g_s), one reduce-scatter.

        References
        ----------
        MPI-4.1, section 6.7.
        """
        return self._gather("Allgather", tensor, gatheraxis, None)

    def _gather(self, name: str, tensor: torch.Tensor, gatheraxis: Any, root: Any) -> torch.Tensor:
        comm = self._comm
        check_tensor(name, "tensor", tensor)
        axis = as_axis(name, "gatheraxis", gatheraxis, tensor.dim())
        rooted = "root" in OPERATIONS[name].arguments
        where = as_root(name, "root", root, comm.size) if rooted else -1
        rows = exchange_rows(name, comm, USER, tensor, (axis, where))
        require_alike(name, comm, rows, ("gatheraxis", "root"), free=(axis,))
        gathered = [row.shape[axis] for row in rows]
        shape = list(tensor.shape)
        shape[axis] = sum(gathered)
        call = Call(
            OPERATIONS[name],
            comm,
            root=where,
            gatheraxis=axis,
            gathered=gathered,
            shape=shape,
            staged=any(row.staged for row in rows),
        )
        return apply(call, tensor)

    def Scatter(
        self, tensor: torch.Tensor, scatteraxis: int, numelem: int, root: int
    ) -> torch.Tensor:
        """Cut the root's tensor along an axis and hand out the pieces.

        Parameters
        ----------
        tensor
            Counts at the root only: shape, dtype and whether a gradient is wanted come from
            there. Elsewhere a placeholder of any shape.
        scatteraxis
            The axis of the root's tensor that is cut; may be negative. The same on every rank.
        numelem
            How much of that axis this rank gets; may differ between ranks. All ranks' numbers add
            up to the size of the axis.
        root
            The rank whose tensor is cut.

        Returns
        -------
        torch.Tensor
            A new contiguous tensor with `numelem` elements along `scatteraxis`, on the device of
            this rank's `tensor`.

        Raises
        ------
        TypeError
            `tensor` is not a strided tensor.
        ValueError
            `root` is no rank, `numelem` is negative. The numbers do not add up, or the ranks
            disagree on root or axis: on all ranks.
        IndexError
            The root's tensor has no such axis: on all ranks.
        MPIError
            The MPI call failed.

        Notes
        -----
        **Adjoint**: the root gets the concatenation of all g_s (a Gather); placeholders get zeros
        of their own shape.

        References
        ----------
        MPI-4.1, section 6.6.
        """
        comm = self._comm
        check_tensor("Scatter", "tensor", tensor)
        where = as_root("Scatter", "root", root, comm.size)
        mine = as_numelem("Scatter", "numelem", numelem)
        raw = _index("Scatter", "scatteraxis", scatteraxis)
        short = max(-65, min(65, raw))  # of the right size to send; no tensor has such an axis
        rows = exchange_rows("Scatter", comm, USER, tensor, (where, short, mine))
        require_number("Scatter", comm, rows, 0, "root")
        source = rows[where]
        theirs = source.numbers[1]
        axis = as_axis("Scatter", "scatteraxis", raw if short == theirs else theirs, source.ndim)
        if any((row.numbers[1] - axis) % source.ndim for row in rows):
            require_number("Scatter", comm, rows, 1, "scatteraxis")
        scattered = [row.numbers[2] for row in rows]
        require_sum("Scatter", comm, scattered, source.shape[axis], axis)
        call = Call(
            OPERATIONS["Scatter"],
            comm,
            root=where,
            scatteraxis=axis,
            scattered=scattered,
            shape=source.shape,
            dtype=name_of(source.dtype),
            staged=any(row.staged for row in rows),
        )
        if not source.wants_grad and not transforms.active():
            tensor = tensor.detach()  # the root decides
        return apply(call, tensor, anchored=bool(source.wants_grad) and torch.is_grad_enabled())

    def Alltoall(
        self, tensor: torch.Tensor, gatheraxis: int, scatteraxis: int, numelem: int
    ) -> torch.Tensor:
        """Gather along one axis and scatter along another, or cut one axis anew; one exchange.

        Parameters
        ----------
        tensor
            Sizes may differ between ranks along `gatheraxis` only.
        gatheraxis
            The axis along which the ranks' tensors are joined; may be negative.
        scatteraxis
            The axis along which the whole is cut; may be negative. With both axes the same, rank
            r ends with `numelem` consecutive elements of the global order.
        numelem
            How much of `scatteraxis` this rank gets; may differ between ranks. All ranks' numbers
            add up to its size.

        Returns
        -------
        torch.Tensor
            What ``Scatter(Gather(tensor, gatheraxis, 0), scatteraxis, numelem, 0)`` gives.

        Raises
        ------
        TypeError, ValueError, IndexError, MPIError
            As for :meth:`Gather` and :meth:`Scatter`.

        Notes
        -----
        **Adjoint**: Alltoall with the axes exchanged.

        References
        ----------
        MPI-4.1, section 6.8.
        """
        comm = self._comm
        check_tensor("Alltoall", "tensor", tensor)
        gather = as_axis("Alltoall", "gatheraxis", gatheraxis, tensor.dim())
        scatter = as_axis("Alltoall", "scatteraxis", scatteraxis, tensor.dim())
        mine = as_numelem("Alltoall", "numelem", numelem)
        rows = exchange_rows("Alltoall", comm, USER, tensor, (gather, scatter, mine))
        require_alike("Alltoall", comm, rows, ("gatheraxis", "scatteraxis"), free=(gather,))
        gathered = [row.shape[gather] for row in rows]
        scattered = [row.numbers[2] for row in rows]
        whole = sum(gathered) if gather == scatter else tensor.shape[scatter]
        require_sum("Alltoall", comm, scattered, whole, scatter)
        inner = math.prod(n for i, n in enumerate(tensor.shape) if i not in (gather, scatter))
        if gather == scatter:
            largest = max(*gathered, *scattered) * inner
        else:
            largest = max(max(gathered) * whole, sum(gathered) * max(scattered)) * inner
        call = Call(
            OPERATIONS["Alltoall"],
            comm,
            gatheraxis=gather,
            scatteraxis=scatter,
            gathered=gathered,
            scattered=scattered,
            staged=any(row.staged for row in rows),
            largest=largest,
        )
        return apply(call, tensor)

    # ------------------------------------------------------------ point to point

    def Isend(self, tensor: torch.Tensor, dest: int | None, tag: int) -> WaitHandle:
        """Start to send a tensor.

        Parameters
        ----------
        tensor
            What is sent, of any layout. Must not be written before the call completes.
        dest
            The rank that receives it; None: nothing is sent.
        tag
            0 to the library's MPI_TAG_UB.

        Returns
        -------
        WaitHandle
            :meth:`Wait` gives `tensor` back, for the graph.

        Raises
        ------
        TypeError, ValueError
            An argument is of the wrong type or out of range.
        MPIError
            The MPI call failed.

        Notes
        -----
        **Adjoint**: the gradient of what was received comes back on a channel of its own and is
        added to that of the tensor :meth:`Wait` returns. It is received where the node of this
        call runs in backward: let the result of :meth:`Wait` reach the loss, if need be by
        :func:`JoinDummies`.

        References
        ----------
        MPI-4.1, section 3.7.2.
        """
        comm = self._comm
        if watch.on:
            watch.refuse(comm, "Isend", _MESSAGE)
        check_tensor("Isend", "tensor", tensor)
        peer = as_peer("Isend", "dest", dest, comm.size)
        return messages.isend(comm, tensor, peer, as_tag("Isend", "tag", tag, mpi.tag_ub()))

    def Irecv(self, tensor: torch.Tensor, source: int | None, tag: int) -> WaitHandle:
        """Start to receive into a tensor.

        Parameters
        ----------
        tensor
            Filled in place, whatever its layout; a shorter message leaves the tail as it was.
        source
            The rank that sends; None: the tensor stays as it is.
        tag
            0 to the library's MPI_TAG_UB.

        Returns
        -------
        WaitHandle
            :meth:`Wait` gives the filled tensor.

        Raises
        ------
        TypeError, ValueError
            An argument is of the wrong type or out of range.
        MPIError
            The MPI call failed.

        Notes
        -----
        **Adjoint**: the gradient is sent back to `source` if the sender wants one. In grad mode
        the result is in the graph, whatever the buffer says; the buffer gets a zero gradient.

        References
        ----------
        MPI-4.1, section 3.7.2.
        """
        comm = self._comm
        if watch.on:
            watch.refuse(comm, "Irecv", _MESSAGE)
        check_tensor("Irecv", "tensor", tensor)
        check_writable("Irecv", "tensor", tensor)
        peer = as_peer("Irecv", "source", source, comm.size)
        return messages.irecv(comm, tensor, peer, as_tag("Irecv", "tag", tag, mpi.tag_ub()))

    def Wait(self, waithandle: WaitHandle) -> torch.Tensor:
        """Complete a non-blocking call.

        Parameters
        ----------
        waithandle
            What the non-blocking call returned.

        Returns
        -------
        torch.Tensor
            Of a send: the tensor that was sent. Of a receive: the tensor that was filled, sharing
            its storage.

        Raises
        ------
        TypeError
            `waithandle` is not a :class:`WaitHandle`; the message has another dtype.
        RuntimeError
            The handle, or one derived from it, has been waited for already.
        MPIError
            The message is longer than the tensor, or MPI failed otherwise.

        References
        ----------
        MPI-4.1, section 3.7.3.
        """
        if not isinstance(waithandle, WaitHandle):
            raise TypeError(
                f"Wait: waithandle must be a WaitHandle, not {type(waithandle).__name__}"
            )
        return messages.complete(waithandle)

    def Send(self, tensor: torch.Tensor, dest: int | None, tag: int) -> torch.Tensor:
        """Send a tensor, and return it for the graph: ``Wait(Isend(tensor, dest, tag))``.

        Parameters
        ----------
        tensor, dest, tag
            As for :meth:`Isend`.

        Returns
        -------
        torch.Tensor
            Shares the storage of `tensor`.

        Raises
        ------
        TypeError, ValueError, MPIError
            As for :meth:`Isend`.

        Notes
        -----
        **Adjoint**: as for :meth:`Isend`.

        References
        ----------
        MPI-4.1, section 3.2.1.
        """
        if watch.on:
            watch.refuse(self._comm, "Send", _MESSAGE)
        return messages.complete(self.Isend(tensor, dest, tag))

    def Recv(self, tensor: torch.Tensor, source: int | None, tag: int) -> torch.Tensor:
        """Receive into a tensor: ``Wait(Irecv(tensor, source, tag))``.

        Parameters
        ----------
        tensor, source, tag
            As for :meth:`Irecv`.

        Returns
        -------
        torch.Tensor
            Shares the storage of `tensor`.

        Raises
        ------
        TypeError, ValueError, MPIError
            As for :meth:`Irecv` and :meth:`Wait`.

        Notes
        -----
        **Adjoint**: as for :meth:`Irecv`.

        References
        ----------
        MPI-4.1, section 3.2.4.
        """
        if watch.on:
            watch.refuse(self._comm, "Recv", _MESSAGE)
        return messages.complete(self.Irecv(tensor, source, tag))

    def Sendrecv(
        self,
        sendtensor: torch.Tensor,
        dest: int | None,
        recvtensor: torch.Tensor,
        source: int | None,
        sendtag: int = 0,
        recvtag: int = 0,
    ) -> torch.Tensor:
        """Send to one rank and receive from another at once.

        Parameters
        ----------
        sendtensor
            What is sent to `dest`, of any layout.
        dest
            The rank that receives it; None: nothing is sent.
        recvtensor
            Filled in place with what `source` sends. Must not share memory with `sendtensor`;
            other rows or columns of one matrix do not.
        source
            The rank that sends; None: `recvtensor` stays as it is.
        sendtag, recvtag
            0 to the library's MPI_TAG_UB.

        Returns
        -------
        torch.Tensor
            What was received, in `recvtensor`'s storage.

        Raises
        ------
        TypeError, ValueError, MPIError
            As for :meth:`Isend` and :meth:`Irecv`; the tensors share memory (``ValueError``).

        Notes
        -----
        **Adjoint**: the reversed Sendrecv: the gradient of what was received goes to `source`,
        that of `sendtensor` comes from `dest`. One node: no hand-made dependency is needed.

        References
        ----------
        MPI-4.1, section 3.10.
        """
        comm = self._comm
        if watch.on:
            watch.refuse(comm, "Sendrecv", _MESSAGE)
        check_tensor("Sendrecv", "sendtensor", sendtensor)
        check_tensor("Sendrecv", "recvtensor", recvtensor)
        check_writable("Sendrecv", "recvtensor", recvtensor)
        if overlap(sendtensor, recvtensor):
            if sendtensor.is_contiguous() and recvtensor.is_contiguous():
                raise ValueError(
                    "Sendrecv: sendtensor and recvtensor share memory; pass sendtensor.clone()"
                )
            # Columns of one matrix, say: what is sent is its value before anything arrives.
            sendtensor = sendtensor.clone(memory_format=torch.contiguous_format)
        return messages.sendrecv(
            comm,
            sendtensor,
            as_peer("Sendrecv", "dest", dest, comm.size),
            recvtensor,
            as_peer("Sendrecv", "source", source, comm.size),
            as_tag("Sendrecv", "sendtag", sendtag, mpi.tag_ub()),
            as_tag("Sendrecv", "recvtag", recvtag, mpi.tag_ub()),
        )


# ---------------------------------------------------------------- verdicts


def _index(call: str, name: str, value: Any) -> int:
    from .arguments import _integer

    return _integer(call, name, value)


# ---------------------------------------------------------------- making and ending


def _predefined(name: str) -> Callable[[], tuple[Any, bool]]:
    def source() -> tuple[Any, bool]:
        from mpi4py import MPI

        return getattr(MPI, name), False

    return source


#: All ranks of the job. Its first use is collective.
COMM_WORLD = Communicator(_predefined("COMM_WORLD"), "COMM_WORLD")
#: This rank alone.
COMM_SELF = Communicator(_predefined("COMM_SELF"), "COMM_SELF")


def comm_from_mpi4py(comm: MPI.Comm) -> Communicator:
    """The communicator that shares the MPI handle of an ``mpi4py`` communicator. Collective.

    Parameters
    ----------
    comm
        An intracommunicator. It stays the caller's: free it after this one.

    Returns
    -------
    Communicator
        :data:`COMM_WORLD` and :data:`COMM_SELF` for mpi4py's. For any other the one that was made
        of it before, unless that has been freed; else a new one, which lives as long as `comm`.

    Raises
    ------
    TypeError
        `comm` is not an ``mpi4py.MPI.Comm``.
    ValueError
        It is ``COMM_NULL`` or an intercommunicator.
    """
    from mpi4py import MPI

    if not isinstance(comm, MPI.Comm):
        raise TypeError(
            f"comm_from_mpi4py: comm must be an mpi4py.MPI.Comm, not {type(comm).__name__}"
        )
    if comm == MPI.COMM_NULL:
        raise ValueError("comm_from_mpi4py: comm is MPI.COMM_NULL")
    if comm == MPI.COMM_WORLD:
        return COMM_WORLD
    if comm == MPI.COMM_SELF:
        return COMM_SELF
    known = comm.Get_attr(_key())
    if isinstance(known, Communicator) and not (known._made is None or known._made.freed):
        return known
    made = Communicator(lambda: (comm, False), f"mpi4py communicator {comm.Get_name()!r}")
    assert made._comm is not None
    comm.Set_attr(_key(), made)  # lives as long as the mpi4py communicator
    return made


_keys: list[int] = []


def _key() -> int:
    """The attribute by which an mpi4py communicator knows the one made of it."""
    if not _keys:
        from mpi4py import MPI

        _keys.append(MPI.Comm.Create_keyval(delete_fn=_released))
    return _keys[0]


def as_communicator(call: str, group: Any) -> Communicator:
    """A communicator from what users pass: None, a Communicator, an mpi4py communicator.

    An mpi4py communicator is wrapped once and remembered with it, so the first such call is
    collective.
    """
    if group is None:
        return COMM_WORLD
    if isinstance(group, Communicator):
        return group
    if type(group).__module__.partition(".")[0] == "mpi4py":
        from mpi4py import MPI

        if isinstance(group, MPI.Comm):
            if group == MPI.COMM_NULL:
                raise ValueError(f"{call}: group is MPI.COMM_NULL: this rank is not in it")
            return comm_from_mpi4py(group)
    raise TypeError(
        f"{call}: group must be None, a mpicoll.Communicator or an mpi4py.MPI.Comm, not "
        f"{type(group).__name__}"
    )


def _released(_comm: Any, _keyval: int, known: Communicator) -> None:
    """The mpi4py communicator is being freed: collective, so ours can go with it."""
    if known._made is not None and not known._made.freed and mpi.is_bound():
        lifetime.report_unanswered(known._made, known._name)
        known._made.free()
