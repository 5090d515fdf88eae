# cython: language_level=3
"""The collectives on contiguous memory. Knows nothing of autograd, devices or axes."""

from cpython.long cimport PyLong_AsLongAndOverflow
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

import sys

import torch

from mpicoll.errors import CollectiveMismatchError

from mpicoll._core.buffers cimport Buffer, allocate_like, read
from mpicoll._core.mpi cimport (
    BACKWARD,
    MPICOLL_SHARED_RANKS,
    OTHER,
    READY,
    USER,
    Comm,
    check,
    library,
    mpicoll_shared,
    usable,
)
from mpicoll._core.mpi_api cimport (
    mpi_Allgather,
    mpi_Allgatherv,
    mpi_Allreduce,
    mpi_Alltoall,
    mpi_Alltoallv,
    mpi_Barrier,
    mpi_Bcast,
    mpi_Exscan,
    mpi_Gather,
    mpi_Gatherv,
    mpi_handle,
    mpi_Iprobe,
    mpi_Irecv,
    mpi_Isend,
    mpi_Reduce,
    mpi_Reduce_scatter,
    mpi_Scan,
    mpi_Scatterv,
    mpi_status,
    mpi_use,
    mpi_Wait,
)

cdef extern from "reductions.h" nogil:
    enum: MPICOLL_MAX, MPICOLL_SUM, MPICOLL_PROD, MPICOLL_AVG, MPICOLL_MINLOC, MPICOLL_MAXLOC
    enum: MPICOLL_U32, MPICOLL_I64, MPICOLL_F32, MPICOLL_F64, MPICOLL_C64, MPICOLL_C128
    int mpicoll_reduce_rows(int, int, const void* const*, int, void*, int64_t)
    int mpicoll_scan_rows(int, int, const void* const*, int, void* const*, int64_t, int, int)
    int mpicoll_fill_neutral(int, int, void*, int64_t)
    int mpicoll_reduction_supported(int, int)

cdef extern from "shared.h" nogil:
    void mpicoll_shared_enter(mpicoll_shared*, uint64_t, const void*, int64_t)
    int mpicoll_shared_all_here(mpicoll_shared*, int)
    int mpicoll_shared_agree(const mpicoll_shared*)
    uint64_t mpicoll_shared_call(const mpicoll_shared*, int)
    const void* mpicoll_shared_data(const mpicoll_shared*, int, int64_t)
    void mpicoll_shared_yield()

mpi_use(&library.functions)

# What `elementwise` and `express` do; the Python side names the first five by these numbers.
cdef enum:
    ALLREDUCE = 0
    BCAST = 1
    REDUCE = 2
    SCAN = 3
    EXSCAN = 4
    ALLGATHER = 5
    GATHER = 6
    SCATTER = 7
    ALLTOALL = 8
    REDUCE_SCATTER = 9
    BARRIER = 10
    AGREE = 11
    SWAP = 12
    BROADCAST = 13

cdef const char** NAMES = [
    b"MPI_Allreduce", b"MPI_Bcast", b"MPI_Reduce", b"MPI_Scan", b"MPI_Exscan",
]
# Below this many bytes over all ranks, every rank gets all rows and adds them itself.
cdef int64_t SMALL = 8192
# Exchanges of pieces use this tag; gradient messages have tags from 1 on.
cdef int EXCHANGE_TAG = 0


# ---------------------------------------------------------------- meeting in shared memory

cdef tuple CALLS = (
    "Allreduce", "Bcast", "Reduce", "Scan", "Exscan", "Allgather", "Gather", "Scatter",
    "Alltoall", "Reduce_scatter", "Barrier", "Exchange of sizes", "Exchange of counts",
    "Broadcast of sizes",
)
cdef tuple REDUCTIONS = (
    "MAX", "MIN", "SUM", "PROD", "LAND", "BAND", "LOR", "BOR", "LXOR", "BXOR", "MINLOC", "MAXLOC",
    "AVG",
)
cdef tuple KINDS = ("int", "uint", "float", "", "bfloat", "complex", "bool")
# How often a rank looks for the others before it lets anybody else run: a few microseconds.
cdef int PATIENCE = 100


cdef uint64_t description(
    int what, int64_t n, int kind=0, int op=-1, int root=0, bint reverse=False
) noexcept nogil:
    """A call as a number: what all ranks must agree on."""
    return (
        <uint64_t>what << 60 | <uint64_t>reverse << 59 | <uint64_t>root << 53
        | <uint64_t>(op & 15) << 49 | <uint64_t>kind << 33 | <uint64_t>n
    )


cdef object in_words(uint64_t call):
    """A description for people."""
    cdef int what = call >> 60, op = call >> 49 & 15, kind = call >> 33 & 0xFFFF
    cdef int root = call >> 53 & 63
    cdef int64_t n = call & 0x1FFFFFFFF
    words = [CALLS[what]]
    if call >> 59 & 1:
        words.append("from the last rank on")
    if op < 15:
        words.append(REDUCTIONS[op])
    if what in (BCAST, REDUCE, GATHER, SCATTER, BROADCAST):
        words.append(f"root {root}")
    if what >= AGREE:
        words.append("1 number" if n == 1 else f"{n} numbers")
    elif what != BARRIER:
        if what != ALLTOALL:  # every rank has its own number
            words.append(
                ("1 element" if n == 1 else f"{n} elements") + " in all" * (what >= ALLGATHER)
            )
        name = KINDS[kind >> 8] if kind >> 8 < 7 else f"kind {kind >> 8} with bits "
        words.append("bool" if name == "bool" else f"{name}{kind & 255}")
    return ", ".join(words)


cdef int meet(Comm c, int channel, uint64_t call, const void* data, int64_t nbytes) except -1:
    """Enter a call together with all ranks, which then can read each other's data.

    Raises on all ranks where they did not mean the same.
    """
    cdef mpicoll_shared* shared = &c.shared[channel]
    cdef mpi_status status
    cdef int found
    if shared.turn and shared.seen < shared.size:
        raise RuntimeError(
            f"{CALLS[call >> 60]} on rank {c.rank} of {c.size}: another thread is inside a "
            "collective on this communicator; use one at a time, in the same order on all ranks, "
            "or a communicator for each thread"
        )
    mpicoll_shared_enter(shared, call, data, nbytes)
    if not mpicoll_shared_all_here(shared, PATIENCE):
        with nogil:
            while not mpicoll_shared_all_here(shared, 0):
                # What a rank waits for that is not here yet may be a message of this one.
                mpi_Iprobe(
                    library.any_source, library.any_tag, c.handle[channel], &found, &status
                )
                mpicoll_shared_yield()
    if not mpicoll_shared_agree(shared):
        raise CollectiveMismatchError(
            f"{CALLS[call >> 60]} on rank {c.rank} of {c.size}: the ranks of the communicator do "
            f"not make the same call:{who_called_what(c, channel)}"
        )
    return 0


cdef object who_called_what(Comm c, int channel):
    """A line for each rank; all are here, so each can tell the others where it was called."""
    places = c.channels[channel].allgather(caller())
    return "".join(
        f"\n  rank {r}: {in_words(mpicoll_shared_call(&c.shared[channel], r))}{place}"
        for r, place in enumerate(places)
    )


cdef object caller():
    """The line of the user's program that runs."""
    frame = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("mpicoll", "torch"):
            return f", {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


cdef int require_same(Comm c, int channel, uint64_t call) except -1:
    """Raise on all ranks where they do not mean the same, if they can tell without a message."""
    if c.shared[channel].lines != NULL:
        meet(c, channel, call, NULL, 0)
    return 0


# ---------------------------------------------------------------- elementwise: one shape everywhere


cdef void divide(void* data, int dtype, int64_t n, int size) noexcept nogil:
    cdef int64_t i
    cdef float* f = <float*>data
    cdef double* d = <double*>data
    if dtype == MPICOLL_C64 or dtype == MPICOLL_C128:
        n *= 2
    if dtype == MPICOLL_F32 or dtype == MPICOLL_C64:
        for i in range(n):
            f[i] = f[i] / size
    else:
        for i in range(n):
            d[i] = d[i] / size


cdef int by_library(
    Comm c, int channel, int what, char* x, char* y, int64_t n, int itemsize, int dtype, int op,
    int root, bint host,
) noexcept nogil:
    """One piece through the library's own function; x == y works in place.

    In the memory of a device (not `host`) an average is left a sum.
    """
    cdef mpi_handle comm = c.handle[channel]
    cdef mpi_handle kind = library.unit[itemsize] if what == BCAST else library.datatype[dtype]
    cdef mpi_handle reduction = library.operation[op][dtype]
    cdef const void* send = library.in_place if x == y else x
    cdef int error
    if what == ALLREDUCE:
        error = mpi_Allreduce(send, y, <int>n, kind, reduction, comm)
    elif what == BCAST:
        if c.rank == root and x != y and n:
            memcpy(y, x, n * itemsize)
        return mpi_Bcast(y, <int>n, kind, root, comm)
    elif what == REDUCE:
        if c.rank == root:
            if x == y and root and n:  # MPICH 4.0 crashes in place on a root that is not rank 0
                send = malloc(n * itemsize)
                if send == NULL:
                    return -1
                memcpy(<void*>send, x, n * itemsize)
            error = mpi_Reduce(send, y, <int>n, kind, reduction, root, comm)
            if x == y and root and n:
                free(<void*>send)
        else:
            error = mpi_Reduce(x, NULL, <int>n, kind, reduction, root, comm)
        if c.rank != root and n:
            memset(y, 0, n * itemsize)
    elif what == SCAN:
        error = mpi_Scan(send, y, <int>n, kind, reduction, comm)
    else:
        error = mpi_Exscan(send, y, <int>n, kind, reduction, comm)
        if c.rank == 0:
            mpicoll_fill_neutral(op, dtype, y, n)
    if op == MPICOLL_AVG and host and not error and (what == ALLREDUCE or c.rank == root):
        divide(y, dtype, n, c.size)
    return error


cdef void combine(
    int what, int op, int dtype, const void** rows, int size, int rank, void* y, int64_t n,
    bint reverse,
) noexcept nogil:
    """What `rank` gets of all rows, combined in rank order; turns `rows` round to reverse."""
    cdef int mine = size, s
    if what == SCAN or what == EXSCAN:
        mine = size - rank if reverse else rank + 1
        if what == EXSCAN:
            mine -= 1
        if reverse:  # the same order of additions as mpicoll_scan_rows
            for s in range(size // 2):
                rows[s], rows[size - 1 - s] = rows[size - 1 - s], rows[s]
    if mine:
        mpicoll_reduce_rows(op, dtype, <const void* const*>rows, mine, y, n)
    else:
        mpicoll_fill_neutral(op, dtype, y, n)


cdef void by_shared(
    Comm c, int channel, int what, void* y, int64_t n, int itemsize, int dtype, int op, int root,
    bint reverse,
) noexcept nogil:
    """One piece whose elements all ranks have in shared memory."""
    cdef const void* rows[MPICOLL_SHARED_RANKS]
    cdef int64_t nbytes = n * itemsize
    cdef int s
    if what == BCAST:
        memcpy(y, mpicoll_shared_data(&c.shared[channel], root, nbytes), nbytes)
    elif what == REDUCE and c.rank != root:
        memset(y, 0, nbytes)
    else:
        for s in range(c.size):
            rows[s] = mpicoll_shared_data(&c.shared[channel], s, nbytes)
        combine(what, op, dtype, rows, c.size, c.rank, y, n, reverse)


cdef int by_rows(
    Comm c, int channel, int what, char* x, char* y, int64_t n, int itemsize, int dtype, int op,
    int root, bint reverse,
) noexcept nogil:
    """One piece added here, in rank order: exchange blocks, combine, send the results back."""
    cdef mpi_handle comm = c.handle[channel]
    cdef mpi_handle unit = library.unit[itemsize]
    cdef int size = c.size, rank = c.rank, error = 0, s, mine
    cdef bint prefix = what == SCAN or what == EXSCAN
    cdef bint small = n * itemsize * size <= SMALL
    cdef int granule = 2 if op == MPICOLL_MINLOC or op == MPICOLL_MAXLOC else 1
    cdef int64_t block = (n // granule + size - 1) // size * granule
    cdef int* counts = <int*>malloc(4 * size * sizeof(int))
    cdef int* starts = counts + size
    cdef int* places = counts + 2 * size
    cdef int* wanted = counts + 3 * size
    cdef void** rows = <void**>malloc(size * sizeof(void*))
    cdef char* scratch = <char*>malloc(size * (n if small else block) * itemsize + 1)
    if counts == NULL or rows == NULL or scratch == NULL:
        free(counts)
        free(rows)
        free(scratch)
        return -1
    if small:
        for s in range(size):
            rows[s] = scratch + s * n * itemsize
        if what == REDUCE:
            error = mpi_Gather(x, <int>n, unit, scratch, <int>n, unit, root, comm)
            if not error and rank == root:
                mpicoll_reduce_rows(op, dtype, <const void* const*>rows, size, y, n)
        else:
            error = mpi_Allgather(x, <int>n, unit, scratch, <int>n, unit, comm)
            if not error:
                combine(what, op, dtype, <const void**>rows, size, rank, y, n, reverse)
    else:
        for s in range(size):
            starts[s] = <int>min(s * block, n)
            counts[s] = <int>(min((s + 1) * block, n) - starts[s])
        mine = counts[rank]
        for s in range(size):
            wanted[s] = mine
            places[s] = s * mine
            rows[s] = scratch + <int64_t>s * mine * itemsize
        error = mpi_Alltoallv(x, counts, starts, unit, scratch, wanted, places, unit, comm)
        if not error and prefix:
            mpicoll_scan_rows(
                op, dtype, <const void* const*>rows, size, <void* const*>rows, mine,
                what == EXSCAN, reverse,
            )
            error = mpi_Alltoallv(scratch, wanted, places, unit, y, counts, starts, unit, comm)
        elif not error:
            mpicoll_reduce_rows(op, dtype, <const void* const*>rows, size, scratch, mine)
            if what == ALLREDUCE:
                error = mpi_Allgatherv(scratch, mine, unit, y, counts, starts, unit, comm)
            else:
                error = mpi_Gatherv(scratch, mine, unit, y, counts, starts, unit, root, comm)
    if what == REDUCE and rank != root and n:
        memset(y, 0, n * itemsize)
    free(counts)
    free(rows)
    free(scratch)
    return error


cdef int64_t piece_of(int itemsize) noexcept nogil:
    """Elements that are reduced at once; even, because pairs are never cut apart."""
    return max(2, min(library.chunk_bytes // itemsize, library.count_limit) // 2 * 2)


def by_mpi_alone(
    Comm c not None, int what, int dtype, int op, int64_t count, int itemsize, bint reverse
):
    """Whether nobody but the MPI library touches the elements: they may be a device's.

    An AVG is then a sum that the caller divides, and a Bcast is in place.
    """
    cdef int64_t piece = piece_of(itemsize)
    cdef int64_t last = count % piece or min(count, piece)
    if reverse or last * itemsize <= c.shared[USER].limit:
        return False
    if what == BCAST:
        return True
    if what != ALLREDUCE and what != SCAN:
        return False  # of these the core writes zeros or neutral elements
    # Others than sums and products are functions of the core.
    return op in (MPICOLL_SUM, MPICOLL_PROD, MPICOLL_AVG) and bool(
        library.has_operation[op][dtype]
        and (MPICOLL_U32 <= dtype <= MPICOLL_I64 or dtype >= MPICOLL_F32)
    )


cdef int run_elementwise(
    Comm c, int channel, int what, Buffer* x, Buffer* y, int op, int root, bint reverse
) except -1:
    cdef int64_t n = x.count, at = 0, piece = piece_of(x.itemsize)
    cdef int error = 0, itemsize = x.itemsize, dtype = x.dtype
    cdef char* source = <char*>x.data
    cdef char* target = <char*>y.data
    cdef bint short = False
    cdef uint64_t call
    if what != BCAST and what != REDUCE:
        root = 0  # whatever the caller says: the ranks must not differ for nothing
    if what != BCAST and not mpicoll_reduction_supported(op, dtype):
        raise TypeError(f"{NAMES[what].decode()}: elements of this dtype are moved, not reduced")
    cdef bint ours = reverse or (what != BCAST and not library.has_operation[op][dtype])
    while True:
        if n - at < piece:
            piece = n - at
        if c.shared[channel].lines != NULL:
            short = piece * itemsize <= c.shared[channel].limit
            call = description(what, piece, x.kind, op, root, reverse)
            meet(c, channel, call, source, piece * itemsize if short else 0)
        if short:
            by_shared(c, channel, what, target, piece, itemsize, dtype, op, root, reverse)
        else:
            with nogil:
                if ours:
                    error = by_rows(
                        c, channel, what, source, target, piece, itemsize, dtype, op, root, reverse
                    )
                else:
                    error = by_library(
                        c, channel, what, source, target, piece, itemsize, dtype, op, root,
                        x.device_type == 1,
                    )
        at += piece
        source += piece * itemsize
        target += piece * itemsize
        if error or at >= n:
            break
    if error == -1:
        raise MemoryError("no memory for the blocks of the other ranks")
    check(error, NAMES[what])
    return 0


cdef int same_kind(Buffer* x, Buffer* y, const char* call) except -1:
    if not (x.contiguous and y.contiguous and x.count == y.count and x.dtype == y.dtype
            and x.itemsize == y.itemsize):
        raise ValueError(
            f"{call.decode()}: the core takes contiguous tensors of one dtype and size"
        )
    if x.itemsize not in (1, 2, 4, 8, 16):
        raise TypeError(f"{call.decode()}: elements of {x.itemsize} bytes are not supported")
    return 0


def elementwise(Comm c not None, int channel, int what, x, y, int op, int root, bint reverse=False):
    """Allreduce, Bcast, Reduce, Scan or Exscan from `x` into `y` (the same tensor: in place)."""
    cdef Buffer source, target
    usable(c, NAMES[what])
    read(x, &source)
    read(y, &target)
    same_kind(&source, &target, NAMES[what])
    run_elementwise(c, channel, what, &source, &target, op, root, reverse)
    return y


# ---------------------------------------------------------------- the express lane

cdef object Tensor = torch.Tensor
cdef object Parameter = torch.nn.Parameter
cdef object grad_enabled = torch.is_grad_enabled
cdef object transforms = torch._C._are_functorch_transforms_active
cdef object is_neg = torch.Tensor.is_neg
cdef object is_conj = torch.Tensor.is_conj
# Read from the modules: a call to ask torch costs three times as much.
cdef dict forward_ad = torch.autograd.forward_ad.__dict__
cdef dict dispatch_modes = torch.utils._python_dispatch.__dict__
cdef bint express_open = True
cdef object in_graph = None


def open_express(bint value):
    """Open or close the express lane (closed while anything wants to see every call)."""
    global express_open
    express_open = value


def graph(function):
    """Set what :func:`express` calls, with its own arguments, for a tensor that requires grad."""
    global in_graph
    in_graph = function


cdef int plain(object tensor, Buffer* buffer) except -1:
    """Describe `tensor`; 1 if it is contiguous CPU memory that holds its value, else 0."""
    cdef object kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        return 0
    try:
        read(tensor, buffer)  # torch refuses sparse, quantized and meta tensors
    except (RuntimeError, BufferError, TypeError):
        return 0
    if buffer.device_type != 1 or not buffer.contiguous or buffer.dtype == OTHER:
        return 0
    if buffer.data == NULL and buffer.count:  # a tensor of zeros without memory
        return 0
    if is_neg(tensor) or (buffer.dtype >= MPICOLL_C64 and is_conj(tensor)):
        return 0
    return 1


def express(Comm c not None, int what, tensor, int op, root):
    """Serve a plain contiguous CPU tensor; None if it is not one.

    `what` counts as for :func:`elementwise`. Everything refused here takes the full path, which
    also words the errors.
    """
    cdef Buffer source, target
    cdef int overflow
    cdef long where
    if not express_open or library.state != READY or c.freed:
        return None
    if not plain(tensor, &source):
        return None
    if (
        dispatch_modes["_is_in_torch_dispatch_mode"] or forward_ad["_current_level"] >= 0
        or transforms()
    ):
        return None
    if what != BCAST and (
        op < 0 or op > MPICOLL_AVG or not library.has_operation[op][source.dtype]
        or (op == MPICOLL_AVG and what >= SCAN)
    ):
        return None
    if type(root) is not int:
        return None
    where = PyLong_AsLongAndOverflow(root, &overflow)
    if overflow or where < 0 or where >= c.size:
        return None
    if tensor.requires_grad and grad_enabled():
        return in_graph(c, what, tensor, op, root)
    result = allocate_like(&source, &target)
    run_elementwise(c, USER, what, &source, &target, op, <int>where, False)
    return result


def direct(Comm c not None, int channel, int what, tensor, int op, int root, bint reverse):
    """:func:`elementwise` into a new tensor for a plain CPU tensor; None if it is not one.

    For calls whose arguments have been checked.
    """
    cdef Buffer source, target
    if not plain(tensor, &source):
        return None
    usable(c, NAMES[what])
    result = allocate_like(&source, &target)
    run_elementwise(c, channel, what, &source, &target, op, root, reverse)
    return result


def express_adjoint(Comm c not None, int what, gradient, int op, int root, bint reverse):
    """:func:`direct` for a gradient; None also where something wants to see every call."""
    if not express_open:
        return None
    return direct(c, BACKWARD, what, gradient, op, root, reverse)


def barrier(Comm c not None, int channel=USER):
    """Wait until every rank of `c` is here."""
    cdef int error
    usable(c, b"MPI_Barrier")
    if c.shared[channel].lines != NULL:
        meet(c, channel, description(BARRIER, 0), NULL, 0)
        return
    with nogil:
        error = mpi_Barrier(c.handle[channel])
    check(error, b"MPI_Barrier")


# ---------------------------------------------------------------- blocks: sizes may differ per rank


cdef class _Counts:
    """Counts and displacements of one side of an exchange, in elements."""

    cdef int n
    cdef int64_t total
    cdef int64_t* counts
    cdef int64_t* starts
    cdef int* small
    cdef int* places

    def __cinit__(self, counts):
        cdef int i
        self.n = len(counts)
        self.counts = <int64_t*>malloc((2 * self.n + 1) * sizeof(int64_t))
        self.small = <int*>malloc((2 * self.n + 1) * sizeof(int))
        if self.counts == NULL or self.small == NULL:
            raise MemoryError()
        self.starts = self.counts + self.n
        self.places = self.small + self.n
        self.total = 0
        for i in range(self.n):
            self.counts[i] = counts[i]
            self.starts[i] = self.total
            self.total += self.counts[i]
            self.small[i] = <int>self.counts[i]  # used only where everything fits
            self.places[i] = <int>self.starts[i]

    def __dealloc__(self):
        free(self.counts)
        free(self.small)


cdef int expect(Buffer* buffer, int64_t count, str call, str which) except -1:
    if not buffer.contiguous or buffer.count != count:
        raise ValueError(
            f"{call}: the {which} buffer holds {buffer.count} elements, contiguous="
            f"{bool(buffer.contiguous)}; {count} contiguous ones are needed"
        )
    return 0


def allgatherv(Comm c not None, int channel, x, y, counts):
    """Blocks of all ranks, one after the other, on every rank; rank r's has `counts[r]`."""
    cdef Buffer source, target
    cdef _Counts sizes = _Counts(counts)
    cdef int error, r
    cdef bint even = True
    usable(c, b"MPI_Allgatherv")
    read(x, &source)
    read(y, &target)
    expect(&source, sizes.counts[c.rank], "Allgather", "send")
    expect(&target, sizes.total, "Allgather", "receive")
    require_same(c, channel, description(ALLGATHER, sizes.total, source.kind))
    if sizes.total > library.count_limit:
        _exchange(
            c, [(x, 0, source.count)] * c.size,
            [(y, sizes.starts[r], sizes.counts[r]) for r in range(c.size)],
        )
        return y
    for r in range(1, c.size):
        even = even and sizes.counts[r] == sizes.counts[0]
    cdef mpi_handle unit = library.unit[source.itemsize]
    with nogil:
        if even:
            error = mpi_Allgather(
                source.data, <int>source.count, unit, target.data, <int>source.count, unit,
                c.handle[channel],
            )
        else:
            error = mpi_Allgatherv(
                source.data, <int>source.count, unit, target.data, sizes.small, sizes.places, unit,
                c.handle[channel],
            )
    check(error, b"MPI_Allgatherv")
    return y


def gatherv(Comm c not None, int channel, x, y, counts, int root):
    """Blocks of all ranks, one after the other, into the root's `y` (None elsewhere)."""
    cdef Buffer source, target
    cdef _Counts sizes = _Counts(counts)
    cdef int error, r
    usable(c, b"MPI_Gatherv")
    read(x, &source)
    expect(&source, sizes.counts[c.rank], "Gather", "send")
    target.data = NULL
    if c.rank == root:
        read(y, &target)
        expect(&target, sizes.total, "Gather", "receive")
    require_same(c, channel, description(GATHER, sizes.total, source.kind, -1, root))
    if sizes.total > library.count_limit:
        _exchange(
            c, [(x, 0, source.count if r == root else 0) for r in range(c.size)],
            [(y, sizes.starts[r], sizes.counts[r]) if c.rank == root else (x, 0, 0)
             for r in range(c.size)],
        )
        return y
    cdef mpi_handle unit = library.unit[source.itemsize]
    with nogil:
        error = mpi_Gatherv(
            source.data, <int>source.count, unit, target.data, sizes.small, sizes.places, unit,
            root, c.handle[channel],
        )
    check(error, b"MPI_Gatherv")
    return y


def scatterv(Comm c not None, int channel, x, y, counts, int root):
    """Pieces of the root's `x` (None elsewhere) to all ranks; rank r's has `counts[r]`."""
    cdef Buffer source, target
    cdef _Counts sizes = _Counts(counts)
    cdef int error, r
    usable(c, b"MPI_Scatterv")
    read(y, &target)
    expect(&target, sizes.counts[c.rank], "Scatter", "receive")
    source.data = NULL
    if c.rank == root:
        read(x, &source)
        expect(&source, sizes.total, "Scatter", "send")
    require_same(c, channel, description(SCATTER, sizes.total, target.kind, -1, root))
    if sizes.total > library.count_limit:
        _exchange(
            c,
            [(x, sizes.starts[r], sizes.counts[r]) if c.rank == root else (y, 0, 0)
             for r in range(c.size)],
            [(y, 0, target.count if r == root else 0) for r in range(c.size)],
        )
        return y
    cdef mpi_handle unit = library.unit[target.itemsize]
    with nogil:
        error = mpi_Scatterv(
            source.data, sizes.small, sizes.places, unit, target.data, <int>target.count, unit,
            root, c.handle[channel],
        )
    check(error, b"MPI_Scatterv")
    return y


def alltoallv(Comm c not None, int channel, x, sendcounts, y, recvcounts, bint large):
    """Block s of `x` to rank s, rank s's block for this rank into block s of `y`.

    `large` (the same on every rank) tells that some rank's total exceeds the count limit.
    """
    cdef Buffer source, target
    cdef _Counts out = _Counts(sendcounts)
    cdef _Counts into = _Counts(recvcounts)
    cdef int error, r
    usable(c, b"MPI_Alltoallv")
    read(x, &source)
    read(y, &target)
    expect(&source, out.total, "Alltoall", "send")
    expect(&target, into.total, "Alltoall", "receive")
    require_same(c, channel, description(ALLTOALL, 0, source.kind))
    if large:
        _exchange(
            c, [(x, out.starts[r], out.counts[r]) for r in range(c.size)],
            [(y, into.starts[r], into.counts[r]) for r in range(c.size)],
        )
        return y
    cdef mpi_handle unit = library.unit[source.itemsize]
    with nogil:
        error = mpi_Alltoallv(
            source.data, out.small, out.places, unit, target.data, into.small, into.places, unit,
            c.handle[channel],
        )
    check(error, b"MPI_Alltoallv")
    return y


def reduce_scatter(Comm c not None, int channel, x, y, counts, int op):
    """Combine the ranks' `x`; rank r keeps the r-th of the blocks with `counts` elements."""
    cdef Buffer source, target
    cdef _Counts sizes = _Counts(counts)
    cdef int error, r
    cdef int64_t mine = sizes.counts[c.rank]
    cdef void** rows
    usable(c, b"MPI_Reduce_scatter")
    read(x, &source)
    read(y, &target)
    if not mpicoll_reduction_supported(op, source.dtype):
        raise TypeError("MPI_Reduce_scatter: elements of this dtype are moved, not reduced")
    expect(&source, sizes.total, "Reduce_scatter", "send")
    expect(&target, mine, "Reduce_scatter", "receive")
    require_same(c, channel, description(REDUCE_SCATTER, sizes.total, source.kind, op))
    if sizes.total <= library.count_limit and library.has_operation[op][source.dtype]:
        with nogil:
            error = mpi_Reduce_scatter(
                source.data, target.data, sizes.small, library.datatype[source.dtype],
                library.operation[op][source.dtype], c.handle[channel],
            )
            if op == MPICOLL_AVG and not error:
                divide(target.data, source.dtype, mine, c.size)
        check(error, b"MPI_Reduce_scatter")
        return y
    scratch = x.new_empty(c.size * mine)
    # A rank's largest side is W times its block or the whole: the same test on every rank.
    large = max([sizes.total] + [c.size * sizes.counts[r] for r in range(c.size)])
    alltoallv(c, channel, x, counts, scratch, [mine] * c.size, large > library.count_limit)
    read(scratch, &source)
    rows = <void**>malloc(c.size * sizeof(void*))
    if rows == NULL:
        raise MemoryError()
    with nogil:
        for r in range(c.size):
            rows[r] = <char*>source.data + r * mine * source.itemsize
        mpicoll_reduce_rows(
            op, source.dtype, <const void* const*>rows, c.size, target.data, mine
        )
    free(rows)
    return y


# ---------------------------------------------------------------- exchanges in pieces


cdef class _Block:
    cdef object keep
    cdef char* data
    cdef int64_t count
    cdef int itemsize
    cdef bint host

    def __init__(self, tensor, int64_t start, int64_t count):
        cdef Buffer buffer
        read(tensor, &buffer)
        if not buffer.contiguous or start < 0 or start + count > buffer.count:
            raise ValueError("exchange: a block lies outside its contiguous tensor")
        self.keep = tensor
        self.data = <char*>buffer.data + start * buffer.itemsize
        self.count = count
        self.itemsize = buffer.itemsize
        self.host = buffer.device_type == 1


def exchange(Comm c not None, send, receive):
    """Send `send[s]` to every rank s and fill `receive[s]` with what rank s sent, without copies.

    Both are lists of contiguous tensors; what s sends and what this rank expects of s must have
    the same number of elements. Collective; long blocks travel in pieces.
    """
    usable(c, b"exchange")
    _exchange(
        c, [(t, 0, t.numel()) for t in send], [(t, 0, t.numel()) for t in receive]
    )


cdef int _exchange(Comm c, list send, list receive) except -1:
    cdef int size = c.size, rank = c.rank, s, k, error = 0, done, nearest = 1
    cdef int64_t at, n, longest = 0
    cdef int64_t piece = library.count_limit
    cdef list blocks = [_Block(*send[s]) for s in range(size)]
    cdef list places = [_Block(*receive[s]) for s in range(size)]
    cdef _Block block
    cdef mpi_handle unit, comm = c.handle[BACKWARD]
    cdef mpi_status status
    cdef mpi_handle* requests = <mpi_handle*>malloc((2 * size + 1) * sizeof(mpi_handle))
    if requests == NULL:
        raise MemoryError()
    # The same pieces on every rank, so that a rank that stages them through the host can take
    # part one chunk at a time.
    block = blocks[rank]
    piece = max(1, min(piece, library.chunk_bytes // block.itemsize))
    for s in range(size):
        longest = max(longest, (<_Block>blocks[s]).count, (<_Block>places[s]).count)
    block = blocks[rank]
    if block.count != (<_Block>places[rank]).count:
        free(requests)
        raise ValueError("exchange: a rank's block for itself has two sizes")
    if not block.host or not (<_Block>places[rank]).host:
        nearest = 0  # MPI copies what a rank sends to itself
    elif block.count:
        memcpy((<_Block>places[rank]).data, block.data, block.count * block.itemsize)
    try:
        at = 0
        while at < longest:
            done = 0
            # Start with the next rank, so that not everybody sends to rank 0 first.
            for k in range(nearest, size):
                s = (rank + size - k) % size
                block = places[s]
                n = min(piece, block.count - at)
                if n > 0 and not error:
                    unit = library.unit[block.itemsize]
                    error = mpi_Irecv(
                        block.data + at * block.itemsize, <int>n, unit, s, EXCHANGE_TAG, comm,
                        &requests[done],
                    )
                    done += not error
            for k in range(nearest, size):
                s = (rank + k) % size
                block = blocks[s]
                n = min(piece, block.count - at)
                if n > 0 and not error:
                    unit = library.unit[block.itemsize]
                    error = mpi_Isend(
                        block.data + at * block.itemsize, <int>n, unit, s, EXCHANGE_TAG, comm,
                        &requests[done],
                    )
                    done += not error
            with nogil:
                for k in range(done):
                    s = mpi_Wait(&requests[k], &status)
                    if s and not error:
                        error = s
            check(error, b"exchange")
            at += piece
    finally:
        free(requests)
    return 0


# ---------------------------------------------------------------- agreement on sizes


cdef int together(
    Comm c, int channel, uint64_t call, const int64_t* mine, int n, int64_t* rows
) except -1:
    """The `n` numbers of all ranks into `rows`."""
    cdef mpicoll_shared* shared = &c.shared[channel]
    cdef int64_t nbytes = n * sizeof(int64_t)
    cdef bint short = nbytes <= shared.limit
    cdef int error, r
    if shared.lines != NULL:
        meet(c, channel, call, mine, nbytes if short else 0)
        if short:
            for r in range(c.size):
                memcpy(rows + r * n, mpicoll_shared_data(shared, r, nbytes), nbytes)
            return 0
    with nogil:
        error = mpi_Allgather(mine, n, library.unit[8], rows, n, library.unit[8], c.handle[channel])
    check(error, b"MPI_Allgather")
    return 0


def agree(Comm c not None, int channel, tuple numbers):
    """Every rank's tuple of integers, in rank order. All ranks give equally many."""
    cdef int n = len(numbers), i, r
    cdef int64_t* mine
    cdef int64_t* all_of_them
    cdef list result = []
    usable(c, b"MPI_Allgather")
    mine = <int64_t*>malloc((n + n * c.size) * sizeof(int64_t) + 1)
    if mine == NULL:
        raise MemoryError()
    all_of_them = mine + n
    try:
        for i in range(n):
            mine[i] = numbers[i]
        together(c, channel, description(AGREE, n), mine, n, all_of_them)
        for r in range(c.size):
            result.append(tuple([all_of_them[r * n + i] for i in range(n)]))
    finally:
        free(mine)
    return result


def swap(Comm c not None, int channel, counts):
    """`counts[s]` goes to rank s; returns what the ranks s meant for this one."""
    cdef _Counts mine = _Counts(counts)
    cdef int r, error, size = c.size
    cdef int64_t* theirs
    usable(c, b"MPI_Alltoall")
    theirs = <int64_t*>malloc(size * size * sizeof(int64_t))
    if theirs == NULL:
        raise MemoryError()
    try:
        if c.shared[channel].lines != NULL:
            together(c, channel, description(SWAP, size), mine.counts, size, theirs)
            return [theirs[r * size + c.rank] for r in range(size)]
        with nogil:
            error = mpi_Alltoall(
                mine.counts, 1, library.unit[8], theirs, 1, library.unit[8], c.handle[channel]
            )
        check(error, b"MPI_Alltoall")
        return [theirs[r] for r in range(size)]
    finally:
        free(theirs)


def broadcast(Comm c not None, int channel, tuple numbers, int root):
    """The root's tuple of integers; all ranks give equally many."""
    cdef int n = len(numbers), i, error
    cdef uint64_t call
    cdef int64_t* values
    usable(c, b"MPI_Bcast")
    values = <int64_t*>malloc((n + n * c.size) * sizeof(int64_t) + 1)
    if values == NULL:
        raise MemoryError()
    try:
        for i in range(n):
            values[i] = numbers[i]
        if c.shared[channel].lines != NULL:
            call = description(BROADCAST, n, 0, 0, root)
            together(c, channel, call, values, n, values + n)
            return tuple([values[n + root * n + i] for i in range(n)])
        with nogil:
            error = mpi_Bcast(values, n, library.unit[8], root, c.handle[channel])
        check(error, b"MPI_Bcast")
        return tuple([values[i] for i in range(n)])
    finally:
        free(values)
