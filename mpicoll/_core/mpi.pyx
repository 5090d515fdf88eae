# cython: language_level=3
"""The MPI library that mpi4py has loaded: its functions, handles and errors."""

import os
import sys
import warnings

from cpython.exc cimport PyErr_SetFromErrno
from libc.stdint cimport int64_t, intptr_t, uintptr_t

from mpicoll._core.mpi_api cimport (
    mpi_Error_class,
    mpi_Error_string,
    mpi_Op_create,
    mpi_find,
    mpi_handle,
    mpi_open,
    mpi_open_error,
    mpi_use,
    mpi_user_function,
    mpi_where,
)

from mpicoll.errors import MPIError

cdef extern from "reductions.h" nogil:
    mpi_user_function* mpicoll_user_op(int op, int dtype)
    int mpicoll_reduction_supported(int op, int dtype)

cdef extern from "shared.h" nogil:
    void* mpicoll_shared_map(int descriptor, int64_t size)
    void mpicoll_shared_unmap(void* segment, int64_t size)
    int64_t mpicoll_shared_bytes(int size, int kinds, int64_t limit)
    void mpicoll_shared_open(mpicoll_shared*, void*, int kind, int rank, int size, int64_t limit)

mpi_use(&library.functions)
library.state = UNBOUND
library.chunk_bytes = 4 << 20
library.count_limit = 0x7FFFFFFF

# Names of the MPI datatypes, in the order of the dtype codes of reductions.h.
_DATATYPES = (
    "UINT8_T", "UINT8_T", "INT8_T", "UINT16_T", "INT16_T", "UINT32_T", "INT32_T", "UINT64_T",
    "INT64_T", "UINT16_T", "UINT16_T", "FLOAT", "DOUBLE", "C_FLOAT_COMPLEX", "C_DOUBLE_COMPLEX",
    "UINT8_T",
)
_UNITS = {1: "UINT8_T", 2: "UINT16_T", 4: "UINT32_T", 8: "UINT64_T", 16: "C_DOUBLE_COMPLEX"}
_OPERATIONS = (
    "MAX", "MIN", "SUM", "PROD", "LAND", "BAND", "LOR", "BOR", "LXOR", "BXOR",
)
# What every library computes rightly: sums and products of 32 and 64 bit integers, floats and
# complex numbers (AVG is a sum). The rest is ours: Open MPI's vector code saturates short
# integers, MPICH 4.0 compares unsigned ones as signed, none propagates NaN or knows bool.
_NATIVE = (*range(5, 9), *range(11, 15))
# Of a single operand MPI makes no truth value (5 stays 5 on one rank): logic is ours too.
_LOGICAL = (4, 6, 8)

_notes = {}


cdef mpi_handle _handle_of(object MPI, object item):
    cdef uintptr_t address = MPI._addressof(item)
    cdef mpi_handle handle
    handle.p = NULL
    if library.functions.int_handles:
        handle.i = (<int*>address)[0]
    else:
        handle.p = (<void**>address)[0]
    return handle


def bind():
    """Take the functions and handles from the MPI library that mpi4py has loaded.

    Initialises MPI as ``import mpi4py.MPI`` does. Does nothing the second time.

    Raises
    ------
    RuntimeError
        MPI is not initialised and mpi4py was told not to, or it has been finalized, or this is
        a forked child.
    ImportError
        The library lacks an MPI-3 function.
    """
    if library.state == READY:
        return
    if library.state == FORKED:
        _refuse(b"mpicoll")
    from mpi4py import MPI

    if not MPI.Is_initialized():
        raise RuntimeError(
            "MPI is not initialized: mpi4py.rc.initialize is False. Call mpi4py.MPI.Init() or "
            "MPI.Init_thread() before the first use of mpicoll"
        )
    if MPI.Is_finalized():
        library.state = FINALIZED
        _refuse(b"mpicoll")
    path = MPI.__file__.encode()
    cdef void* module = mpi_open(path)
    if module == NULL:
        raise ImportError(mpi_open_error().decode())
    cdef const char* missing = mpi_find(&library.functions, module)
    if missing != NULL:
        raise ImportError(
            f"the MPI library ({MPI.Get_library_version().splitlines()[0]}) lacks "
            f"{missing.decode()}"
        )
    library.functions.int_handles = MPI._sizeof(MPI.Comm) == 4
    library.in_place = <void*><intptr_t><long long>int(MPI.IN_PLACE)
    library.proc_null = MPI.PROC_NULL
    library.any_source = MPI.ANY_SOURCE
    library.any_tag = MPI.ANY_TAG
    library.tag_ub = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    for code, name in enumerate(_DATATYPES):
        library.datatype[code] = _handle_of(MPI, getattr(MPI, name))
    for size, name in _UNITS.items():
        library.unit[<int>size] = _handle_of(MPI, getattr(MPI, name))
    cdef int op, dtype
    cdef mpi_user_function* function
    for op in range(len(_OPERATIONS)):
        native = _handle_of(MPI, getattr(MPI, _OPERATIONS[op]))
        for dtype in range(DTYPES):
            function = mpicoll_user_op(op, dtype)
            if op in _LOGICAL and dtype != 0:
                continue
            if op in (2, 3) and dtype in _NATIVE:
                library.operation[op][dtype] = native
                library.has_operation[op][dtype] = 1
            elif function != NULL:
                check(mpi_Op_create(function, 1, &library.operation[op][dtype]), b"MPI_Op_create")
                library.has_operation[op][dtype] = 1
    for dtype in range(DTYPES):  # AVG: the library adds, the caller divides
        library.operation[12][dtype] = library.operation[2][dtype]
        library.has_operation[12][dtype] = dtype >= 11
    _notes.update(
        library=MPI.Get_library_version().strip("\0 \n"),
        path=(mpi_where(library.functions.Allreduce) or b"unknown").decode(),
        abi="MPICH" if library.functions.int_handles
        else "MPI-5 standard" if getattr(MPI, "Get_abi_version", lambda: (-1, -1))()[0] > 0
        else "Open MPI",
        thread_level=MPI.Query_thread(),
        missing=[
            f"MPI_{name}"
            for name, there in (
                ("Allreduce_c", library.functions.Allreduce_c != NULL),
                ("Allreduce_init", library.functions.Allreduce_init != NULL),
                ("Session_init", library.functions.Session_init != NULL),
            )
            if not there
        ],
    )
    # MPI.Finalize() by hand: COMM_SELF's attributes are deleted first, which tells us.
    keyval = MPI.Comm.Create_keyval(delete_fn=_finalized)
    MPI.COMM_SELF.Set_attr(keyval, True)
    library.state = READY
    _check_launcher(MPI)


def _finalized(*_):
    library.state = FINALIZED


def _forked():
    MPI = sys.modules.get("mpi4py.MPI")
    if library.state == READY or (
        library.state == UNBOUND and MPI is not None and MPI.Is_initialized()
        and not MPI.Is_finalized()
    ):
        library.state = FORKED


os.register_at_fork(after_in_child=_forked)


def _check_launcher(MPI):
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE"):
        told = os.environ.get(variable, "")
        if told.isdigit() and int(told) > 1 and MPI.COMM_WORLD.size == 1:
            _notes["launcher"] = (
                f"the launcher started {told} processes ({variable}={told}) but this MPI library "
                f"sees only one ({_notes['library'].splitlines()[0]}, {_notes['path']}): the "
                "mpiexec of one MPI was used with the library of another"
            )
            warnings.warn(f"mpicoll: {_notes['launcher']}", RuntimeWarning, stacklevel=2)
            return
    _notes["launcher"] = ""


def notes():
    """Facts about the library that :func:`bind` found, as a dictionary."""
    return dict(_notes)


def is_bound():
    """Whether MPI is in use by mpicoll now."""
    return library.state == READY


def limits(chunk_bytes=None, count_limit=None):
    """Set the longest piece (bytes) and the largest count; return both.

    Must be the same on every rank.
    """
    if chunk_bytes is not None:
        library.chunk_bytes = chunk_bytes
    if count_limit is not None:
        library.count_limit = count_limit
    return library.chunk_bytes, library.count_limit


def shared_ranks():
    """Of how many ranks the short messages may travel through shared memory."""
    return MPICOLL_SHARED_RANKS


def shared_size(int size, limit):
    """Bytes of shared memory for a communicator of `size` ranks and messages up to `limit`."""
    return mpicoll_shared_bytes(size, 3, limit)


def supported(int op, int dtype):
    """Whether mpicoll reduces elements of this dtype code with this operation."""
    return 0 <= dtype < DTYPES and mpicoll_reduction_supported(op, dtype) != 0


cdef _refuse(const char* call):
    name = call.decode()
    if library.state == FINALIZED:
        raise RuntimeError(f"{name}: MPI has been finalized")
    if library.state == FORKED:
        raise RuntimeError(
            f"{name}: this process was forked from one that uses MPI, and MPI cannot be used in "
            "it; start such workers with multiprocessing_context='spawn', or keep communication "
            "in the parent"
        )
    raise RuntimeError(f"{name}: mpicoll is not bound to an MPI library yet")


cdef int usable(Comm comm, const char* call) except -1:
    if library.state != READY:
        _refuse(call)
    if comm.freed:
        raise ValueError(f"{call.decode()}: this communicator has been freed")
    return 0


cdef int check(int error, const char* call) except -1:
    cdef char text[4096]
    cdef int length = 0
    cdef int error_class = error
    if error == 0:
        return 0
    text[0] = 0
    mpi_Error_class(error, &error_class)
    mpi_Error_string(error, text, &length)
    raise MPIError(call.decode(), error, error_class, text[:length].decode(errors="replace"))


cdef class Segment:
    """Shared memory: `size` bytes of a file, mapped until this object dies.

    Python's own ``mmap`` would keep a file descriptor for each.
    """

    def __init__(self, int descriptor, int64_t size):
        self.memory = mpicoll_shared_map(descriptor, size)
        self.size = size
        if self.memory == NULL:
            PyErr_SetFromErrno(OSError)

    def __dealloc__(self):
        if self.memory != NULL:
            mpicoll_shared_unmap(self.memory, self.size)


cdef class Comm:
    """An MPI communicator with the duplicates that keep kinds of traffic apart.

    Parameters
    ----------
    base
        The ``mpi4py`` communicator whose handle is shared with the user.
    channels
        ``mpi4py`` communicators for user, backward and control traffic.
    segment
        Memory that all ranks share and the longest message that travels through it, in bytes;
        None: there is none.
    """

    def __init__(self, base, channels, segment=None):
        cdef int i
        from mpi4py import MPI

        self.base = base
        self.channels = tuple(channels)
        self.rank = base.rank
        self.size = base.size
        self.freed = False
        for i in range(3):
            self.handle[i] = _handle_of(MPI, self.channels[i])
        if segment is not None:
            self.segment, limit = segment  # stays mapped
            for i in range(3):
                mpicoll_shared_open(
                    &self.shared[i], self.segment.memory, i, self.rank, self.size, limit
                )

    @property
    def shared_bytes(self):
        """The longest message that travels through shared memory, in bytes; 0: none does."""
        return self.shared[0].limit

    def free(self):
        """Free the channels that are duplicates. Collective."""
        from mpi4py import MPI

        usable(self, b"Free")
        self.freed = True
        status = MPI.Status()
        for channel in self.channels:
            # A library may use the context again: what nobody received would reach its successor.
            while channel.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                lost = bytearray(status.Get_count(MPI.BYTE))
                channel.Recv([lost, MPI.BYTE], status.Get_source(), status.Get_tag())
            if channel is not self.base:
                channel.Free()

    def take(self):
        """The next number of a message that this rank sends."""
        self.sequence += 1
        return self.sequence


def tag_ub():
    """The largest tag."""
    return library.tag_ub
