# cython: language_level=3
"""Collectives that go on while the program computes.

MPI never matches one of these with a blocking collective, and wants them started in the same
order on every rank. Nothing has to be tested or waited for in any order.
"""

from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from mpicoll._core.buffers cimport Buffer, read
from mpicoll._core.mpi cimport READY, Comm, check, library, usable
from mpicoll._core.mpi_api cimport (
    mpi_handle,
    mpi_Iallgather,
    mpi_Iallgatherv,
    mpi_Iallreduce,
    mpi_Ialltoallv,
    mpi_status,
    mpi_Test,
    mpi_use,
    mpi_Wait,
)

cdef extern from "reductions.h" nogil:
    enum: MPICOLL_AVG, MPICOLL_MINLOC, MPICOLL_MAXLOC, MPICOLL_F32, MPICOLL_C64
    int mpicoll_reduce_rows(int, int, const void* const*, int, void*, int64_t)
    int mpicoll_reduction_supported(int, int)

mpi_use(&library.functions)

# How an all-reduce is carried out.
cdef enum:
    BY_LIBRARY = 0  # the library's own function
    BY_ROWS = 1  # every rank gets all rows and adds them itself
    BY_BLOCKS = 2  # every rank adds one block of all rows; a second step collects the blocks

# Below this many bytes over all ranks, every rank gets all rows.
cdef int64_t SMALL = 8192

# MPI may use the buffers until a request completes: nothing in flight is ever freed.
cdef set flying = set()
# Per communicator, in the order of their start: those whose second step has not started. It starts
# in this order on every rank, whichever of them is tested or waited for.
cdef dict queues = {}


def in_flight():
    """The requests that have not completed."""
    return list(flying)


def reap():
    """Let those that have completed, and that nobody waits for any more, go."""
    for request in list(flying):
        if library.state == READY and not (<CollectiveRequest>request).comm.freed:
            (<CollectiveRequest>request).test()


cdef class CollectiveRequest:
    """A collective in flight. It owns its buffers until it completes.

    One thread at a time may test or wait for the requests of a communicator.
    """

    cdef readonly Comm comm
    cdef readonly bint done
    cdef object keep
    cdef Buffer target
    cdef int way, op, pieces, complete, error, second_channel, divisor
    cdef bint second  # the second step has started
    cdef int64_t piece
    cdef mpi_handle* requests
    cdef int* counts  # of all pieces: what is sent, its places, what is received, its places
    cdef char* scratch
    cdef void** rows
    cdef int* present
    cdef const char* call

    def __dealloc__(self):
        free(self.requests)
        free(self.counts)
        free(self.scratch)
        free(self.rows)
        free(self.present)

    cdef int _completed(self, bint block) except -1:
        """Whether the messages of this step have arrived; waits for them if `block`."""
        cdef mpi_status status
        cdef int error = 0, flag = 1
        with nogil:
            while self.complete < self.pieces:
                if block:
                    error = mpi_Wait(&self.requests[self.complete], &status)
                else:
                    error = mpi_Test(&self.requests[self.complete], &flag, &status)
                    if not flag and not error:
                        break
                if error and not self.error:
                    self.error = error
                self.complete += 1
        return self.complete == self.pieces

    cdef int64_t _length(self, int k) noexcept nogil:
        return min(self.piece, self.target.count - k * self.piece)

    cdef void _combine(self, int k) noexcept nogil:
        """Reduce the rows that have come for piece `k`: to the result, or to this rank's block."""
        cdef int size = self.comm.size, itemsize = self.target.itemsize, s
        cdef int64_t n = self._length(k)
        cdef char* area = self.scratch
        cdef void* out = <char*>self.target.data + k * self.piece * itemsize
        if self.way == BY_BLOCKS:
            area += k * size * self._block(self.piece) * itemsize
            out = area
            n = self.counts[4 * size * k + self.comm.rank]
        for s in range(self.divisor):
            self.rows[s] = area + self.present[s] * n * itemsize
        mpicoll_reduce_rows(
            self.op, self.target.dtype, <const void* const*>self.rows, self.divisor, out, n
        )

    cdef int64_t _block(self, int64_t n) noexcept nogil:
        # (value, index) pairs are never cut apart
        cdef int granule = 2 if self.op == MPICOLL_MINLOC or self.op == MPICOLL_MAXLOC else 1
        return (n // granule + self.comm.size - 1) // self.comm.size * granule

    cdef int _second_step(self) except -1:
        """Add up this rank's blocks and start to collect everybody's."""
        cdef int size = self.comm.size, itemsize = self.target.itemsize, k, error = self.error
        cdef int* counts
        cdef char* area
        cdef char* out
        cdef list queue = queues[self.comm]
        queue.remove(self)
        if not queue:
            del queues[self.comm]
        self.second = True
        if error:
            return 0
        with nogil:
            for k in range(self.pieces):
                self._combine(k)
                counts = self.counts + 4 * size * k
                area = self.scratch + k * size * self._block(self.piece) * itemsize
                out = <char*>self.target.data + k * self.piece * itemsize
                error = mpi_Iallgatherv(
                    area, counts[self.comm.rank], library.unit[itemsize], out, counts,
                    counts + size, library.unit[itemsize], self.comm.handle[self.second_channel],
                    &self.requests[k],
                )
                if error:
                    break
        self.complete = 0
        if error:
            self.error = error
            self.pieces = k
        return 0

    cdef int _advance(self, bint block) except -1:
        """Whether everything has arrived; waits for it if `block`."""
        cdef CollectiveRequest first
        cdef list queue
        if self.way == BY_BLOCKS:
            while not self.second:
                queue = queues[self.comm]
                first = queue[0]
                if not first._completed(block):
                    return 0
                first._second_step()
        return self._completed(block)

    cdef int _finish(self) except -1:
        cdef int64_t n = self.target.count, i
        cdef int k
        cdef float* f = <float*>self.target.data
        cdef double* d = <double*>self.target.data
        self.done = True
        if not self.error:
            with nogil:
                if self.way == BY_ROWS:
                    for k in range(self.pieces):
                        self._combine(k)
                elif self.way == BY_LIBRARY and self.op == MPICOLL_AVG:
                    if self.target.dtype >= MPICOLL_C64:
                        n *= 2
                    if self.target.dtype == MPICOLL_F32 or self.target.dtype == MPICOLL_C64:
                        for i in range(n):
                            f[i] = f[i] / self.divisor
                    else:
                        for i in range(n):
                            d[i] = d[i] / self.divisor
        free(self.scratch)
        self.scratch = NULL
        self.keep = None
        if self in flying:
            flying.discard(self)
            Py_DECREF(self)
        return 0

    def wait(self):
        """Block until the result is there.

        Raises MPIError, each time, where MPI has reported an error.
        """
        if not self.done:
            usable(self.comm, b"MPI_Wait")
            self._advance(True)
            self._finish()
        check(self.error, self.call)

    def test(self):
        """Whether the result is there (or an error, which :meth:`wait` raises)."""
        if not self.done:
            usable(self.comm, b"MPI_Test")
            if self._advance(False):
                self._finish()
        return bool(self.done)


cdef int _start_piece(CollectiveRequest r, int channel, const char* x, int k) noexcept nogil:
    cdef int size = r.comm.size, itemsize = r.target.itemsize, s
    cdef mpi_handle comm = r.comm.handle[channel]
    cdef mpi_handle unit = library.unit[itemsize]
    cdef int64_t n = r._length(k), block = r._block(r.piece), at
    cdef const char* source = x + k * r.piece * itemsize
    cdef char* target = <char*>r.target.data + k * r.piece * itemsize
    cdef int* counts
    if r.way == BY_LIBRARY:
        return mpi_Iallreduce(
            library.in_place if source == target else source, target, <int>n,
            library.datatype[r.target.dtype], library.operation[r.op][r.target.dtype], comm,
            &r.requests[k],
        )
    if r.way == BY_ROWS:
        return mpi_Iallgather(
            source, <int>n, unit, r.scratch, <int>n, unit, comm, &r.requests[k]
        )
    counts = r.counts + 4 * size * k
    for s in range(size):
        at = min(s * block, n)
        counts[size + s] = <int>at
        counts[s] = <int>(min((s + 1) * block, n) - at)
    for s in range(size):
        counts[2 * size + s] = counts[r.comm.rank]
        counts[3 * size + s] = s * counts[r.comm.rank]
    return mpi_Ialltoallv(
        source, counts, counts + size, unit, r.scratch + k * size * block * itemsize,
        counts + 2 * size, counts + 3 * size, unit, comm, &r.requests[k],
    )


def iallreduce(Comm c not None, int channel, int second, x, y, int op, present=None):
    """Start to reduce `x` over all ranks into `y` (the same tensor: in place).

    `second` is the channel of a second message, which starts once the first has arrived: nothing
    else that is collective may travel on it. `present` are the ranks, in ascending order, whose
    tensors count; the others give the neutral element. AVG divides by their number.
    """
    cdef Buffer source
    cdef CollectiveRequest r
    cdef int k, error = 0, size = c.size
    cdef int64_t piece, wanted
    cdef const char* call = b"MPI_Iallreduce"
    usable(c, call)
    reap()
    r = CollectiveRequest.__new__(CollectiveRequest)
    read(x, &source)
    read(y, &r.target)
    if not (source.contiguous and r.target.contiguous and source.count == r.target.count
            and source.kind == r.target.kind):
        raise ValueError("MPI_Iallreduce: the core takes contiguous tensors of one dtype and size")
    if not mpicoll_reduction_supported(op, source.dtype):
        raise TypeError("MPI_Iallreduce: elements of this dtype are moved, not reduced")
    ranks = range(size) if present is None else present
    r.comm = c
    r.keep = (x, y)
    r.op = op
    r.call = call
    r.second_channel = second
    r.divisor = len(ranks)
    piece = library.count_limit // 2 * 2  # pairs are never cut apart
    piece = max(2, min(piece, source.count))
    r.piece = piece
    r.pieces = <int>max(1, (source.count + piece - 1) // piece)
    if library.has_operation[op][source.dtype]:
        r.way = BY_LIBRARY
    elif r.pieces == 1 and source.count * source.itemsize * size <= SMALL:
        r.way = BY_ROWS
    else:
        r.way = BY_BLOCKS
    wanted = 0
    if r.way == BY_ROWS:
        wanted = size * source.count
    elif r.way == BY_BLOCKS:
        wanted = r.pieces * size * r._block(piece)
        r.counts = <int*>malloc(r.pieces * 4 * size * sizeof(int))
    r.requests = <mpi_handle*>malloc(r.pieces * sizeof(mpi_handle))
    r.scratch = <char*>malloc(wanted * source.itemsize + 1)
    r.rows = <void**>malloc(size * sizeof(void*))
    r.present = <int*>malloc(size * sizeof(int))
    if (r.requests == NULL or r.scratch == NULL or r.rows == NULL or r.present == NULL
            or (r.way == BY_BLOCKS and r.counts == NULL)):
        raise MemoryError("no memory for the blocks of the other ranks")
    for k in range(r.divisor):
        r.present[k] = ranks[k]
    with nogil:
        for k in range(r.pieces):
            error = _start_piece(r, channel, <const char*>source.data, k)
            if error:
                break
    if error:
        r.pieces = k
        r.error = error
        r.way = BY_LIBRARY  # no second step
    elif r.way == BY_BLOCKS:
        queues.setdefault(c, []).append(r)
    flying.add(r)
    Py_INCREF(r)  # not even the end of the interpreter frees what MPI may still use
    check(error, call)
    return r
