# cython: language_level=3
"""Point-to-point messages. Every message has a header that travels beside it.

The header tells the sender's number for the message, its size and dtype, and whether the sender
wants a gradient. It goes with the user's tag on the control communicator, so the payload is sent
and received in place. A gradient message travels on the backward communicator under a tag made
of the number of the message that it answers: it cannot be mistaken for another, in whatever
order the two ranks run their nodes.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

from mpicoll._core.buffers cimport Buffer, read
from mpicoll._core.mpi cimport BACKWARD, CONTROL, READY, Comm, check, library, usable
from mpicoll._core.mpi_api cimport (
    mpi_Cancel,
    mpi_handle,
    mpi_Iprobe,
    mpi_Irecv,
    mpi_Isend,
    mpi_status,
    mpi_Test,
    mpi_Type_commit,
    mpi_Type_create_hindexed,
    mpi_Type_free,
    mpi_use,
    mpi_Wait,
)

mpi_use(&library.functions)


cdef struct Header:
    int64_t sequence
    int64_t nbytes
    int64_t dtype
    int64_t wants
    int64_t source
    int64_t spare[3]


cdef int64_t _reverse_tag(int64_t sequence) noexcept:
    return 1 + sequence % library.tag_ub


def reverse_tag(int64_t sequence):
    """The tag of the gradient message that answers the message with this number."""
    return _reverse_tag(sequence)


cdef int _large_type(int64_t nbytes, mpi_handle* made) except -1:
    """A datatype of `nbytes` bytes, for counts that one MPI argument cannot hold.

    A plain run of bytes: sender and receiver may have buffers of different length.
    """
    cdef int64_t limit = library.count_limit, i
    cdef int64_t n = (nbytes + limit - 1) // limit
    cdef int* lengths = <int*>malloc(n * sizeof(int))
    cdef int64_t* places = <int64_t*>malloc(n * sizeof(int64_t))
    cdef int error
    if lengths == NULL or places == NULL:
        free(lengths)
        free(places)
        raise MemoryError()
    for i in range(n):
        lengths[i] = <int>min(limit, nbytes - i * limit)
        places[i] = i * limit
    error = mpi_Type_create_hindexed(<int>n, lengths, places, library.unit[1], made)
    free(lengths)
    free(places)
    check(error, b"MPI_Type_create_hindexed")
    check(mpi_Type_commit(made), b"MPI_Type_commit")
    return 0


# MPI may use a request's buffer and header until it completes: nothing in flight is ever freed,
# whoever forgets it.
cdef set flying = set()


def in_flight():
    """The requests that have not completed."""
    return list(flying)


cdef class Request:
    """A message in flight. It owns its buffer until it completes."""

    cdef mpi_handle payload
    cdef mpi_handle beside
    cdef Header header
    cdef Buffer buffer
    cdef object keep
    cdef readonly Comm comm
    cdef readonly bint receives
    cdef readonly bint done  # both messages have completed
    cdef bint payload_done
    cdef bint header_done

    @property
    def sequence(self):
        """The sender's number for the message; a receive knows it once complete."""
        return self.header.sequence

    @property
    def wants(self):
        """Whether the sender wants a gradient."""
        return self.header.wants != 0

    @property
    def nbytes(self):
        """Size of what was sent."""
        return self.header.nbytes

    @property
    def source(self):
        """Rank of the sender."""
        return self.header.source

    @property
    def agrees(self):
        """Whether sender and receiver meant the same dtype (true where nothing was sent)."""
        return self.header.sequence == 0 or self.header.dtype == self.buffer.kind

    cdef int _finish(self) except -1:
        self.done = self.payload_done and self.header_done
        if self.done:
            self.keep = None
            flying.discard(self)
        return 0

    def wait(self):
        """Block until the message has arrived, or its buffer may be used again."""
        cdef mpi_status status
        cdef int error = 0, later = 0
        if self.done:
            return
        usable(self.comm, b"MPI_Wait")
        with nogil:
            if not self.payload_done:
                error = mpi_Wait(&self.payload, &status)
                self.payload_done = True
            if not self.header_done:
                later = mpi_Wait(&self.beside, &status)
                self.header_done = True
        self._finish()
        check(error, b"MPI_Wait")
        check(later, b"MPI_Wait")

    def test(self):
        """Whether the message has arrived, or its buffer may be used again."""
        cdef mpi_status status
        cdef int error = 0, flag = 0
        if self.done:
            return True
        usable(self.comm, b"MPI_Test")
        with nogil:
            if not self.payload_done:
                error = mpi_Test(&self.payload, &flag, &status)
                self.payload_done = flag or error
            if not error and not self.header_done:
                error = mpi_Test(&self.beside, &flag, &status)
                self.header_done = flag or error
        self._finish()
        check(error, b"MPI_Test")
        return bool(self.done)

    def cancel(self):
        """Give up a receive that nothing has matched (at exit)."""
        if not self.done and self.receives and library.state == READY and not self.comm.freed:
            if not self.payload_done:
                mpi_Cancel(&self.payload)
            if not self.header_done:
                mpi_Cancel(&self.beside)


cdef Request _request(Comm comm, tensor, bint receives):
    cdef Request request = Request.__new__(Request)
    read(tensor, &request.buffer)
    if not request.buffer.contiguous or request.buffer.itemsize not in (1, 2, 4, 8, 16):
        raise ValueError(
            "point to point: the core takes contiguous tensors of 1 to 16 byte elements"
        )
    request.comm = comm
    request.receives = receives
    request.keep = tensor
    return request


cdef int _start(Request request, int peer, int tag, int payload_channel, int header_channel,
                int header_tag) except -1:
    cdef Buffer* buffer = &request.buffer
    # Bytes, so that a message of another dtype can be received, and then refused by name.
    cdef int64_t count = buffer.count * buffer.itemsize
    cdef mpi_handle kind = library.unit[1]
    cdef mpi_handle payload_comm = request.comm.handle[payload_channel]
    cdef mpi_handle header_comm = request.comm.handle[header_channel]
    cdef bint large = count > library.count_limit
    cdef int error = 0, later = 0
    if large:
        _large_type(count, &kind)
        count = 1
    with nogil:
        # Header first: on the backward communicator both have one tag and keep their order.
        if request.receives:
            error = mpi_Irecv(
                &request.header, sizeof(Header) // 8, library.unit[8], peer, header_tag,
                header_comm, &request.beside,
            )
            if not error:
                later = mpi_Irecv(
                    buffer.data, <int>count, kind, peer, tag, payload_comm, &request.payload
                )
        else:
            error = mpi_Isend(
                &request.header, sizeof(Header) // 8, library.unit[8], peer, header_tag,
                header_comm, &request.beside,
            )
            if not error:
                later = mpi_Isend(
                    buffer.data, <int>count, kind, peer, tag, payload_comm, &request.payload
                )
    if large:
        mpi_Type_free(&kind)
    request.header_done = error != 0
    request.payload_done = error != 0 or later != 0
    request._finish()
    if not request.done:
        flying.add(request)
    check(error or later, b"MPI_Irecv" if request.receives else b"MPI_Isend")
    return 0


def isend(Comm comm not None, tensor, int dest, int tag, bint wants):
    """Start to send `tensor`; `wants` tells the receiver to send a gradient back."""
    cdef Request request
    usable(comm, b"MPI_Isend")
    request = _request(comm, tensor, False)
    request.header.sequence = comm.take()
    request.header.nbytes = request.buffer.count * request.buffer.itemsize
    request.header.dtype = request.buffer.kind
    request.header.wants = wants
    request.header.source = comm.rank
    _start(request, dest, tag, 0, CONTROL, tag)
    return request


def irecv(Comm comm not None, tensor, int source, int tag):
    """Start to receive into `tensor`."""
    cdef Request request
    usable(comm, b"MPI_Irecv")
    request = _request(comm, tensor, True)
    _start(request, source, tag, 0, CONTROL, tag)
    return request


def isend_gradient(Comm comm not None, tensor, int dest, int64_t answers, bint wants):
    """Start to send the gradient of the message that `dest` numbered `answers`."""
    cdef Request request
    cdef int tag = <int>_reverse_tag(answers)
    usable(comm, b"MPI_Isend")
    request = _request(comm, tensor, False)
    request.header.sequence = comm.take()
    request.header.nbytes = request.buffer.count * request.buffer.itemsize
    request.header.dtype = request.buffer.kind
    request.header.wants = wants
    request.header.source = comm.rank
    _start(request, dest, tag, BACKWARD, BACKWARD, tag)
    return request


def irecv_gradient(Comm comm not None, tensor, int source, int64_t answers):
    """Start to receive the gradient of this rank's message number `answers`."""
    cdef Request request
    cdef int tag = <int>_reverse_tag(answers)
    usable(comm, b"MPI_Irecv")
    request = _request(comm, tensor, True)
    _start(request, source, tag, BACKWARD, BACKWARD, tag)
    return request


def unanswered(Comm comm not None):
    """Whether a gradient message has arrived on `comm` that no node received."""
    cdef mpi_status status
    cdef int flag = 0, error = 0, _probe
    usable(comm, b"MPI_Iprobe")
    with nogil:
        for _probe in range(64):  # a probe may do no more than let the library make progress
            error = mpi_Iprobe(
                library.any_source, library.any_tag, comm.handle[BACKWARD], &flag, &status
            )
            if error or flag:
                break
    check(error, b"MPI_Iprobe")
    return flag != 0
