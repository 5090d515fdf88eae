from libc.stdint cimport int64_t, uint64_t

from mpicoll._core.mpi_api cimport mpi_functions, mpi_handle


cdef extern from "shared.h" nogil:
    enum: MPICOLL_SHARED_RANKS
    ctypedef struct mpicoll_shared:
        char* lines
        int size
        int64_t limit
        uint64_t turn
        int seen

cdef enum:
    UNBOUND = 0
    READY = 1
    FINALIZED = 2
    FORKED = 3

cdef enum:
    USER = 0
    BACKWARD = 1
    CONTROL = 2

cdef enum:
    OPERATIONS = 13
    DTYPES = 15
    OTHER = 15  # a dtype that is moved and never computed with

cdef struct Library:
    mpi_functions functions
    int state
    void* in_place
    int proc_null
    int any_source
    int any_tag
    int tag_ub
    int64_t chunk_bytes  # the longest piece that is reduced or staged at once
    int64_t count_limit  # the largest count given to one MPI call
    mpi_handle datatype[16]
    mpi_handle unit[17]
    mpi_handle operation[13][16]
    int has_operation[13][16]

cdef Library library

cdef class Segment:
    cdef void* memory
    cdef int64_t size

cdef class Comm:
    cdef mpi_handle handle[3]
    cdef mpicoll_shared shared[3]
    cdef Segment segment
    cdef readonly int rank
    cdef readonly int size
    cdef readonly object base
    cdef readonly tuple channels
    cdef readonly bint freed
    cdef int64_t sequence
    cdef object __weakref__

cdef int usable(Comm comm, const char* call) except -1
cdef int check(int error, const char* call) except -1
