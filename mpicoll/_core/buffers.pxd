from libc.stdint cimport int32_t, int64_t

cdef struct Buffer:
    void* data
    int64_t count
    int itemsize
    int dtype  # code of reductions.h, or OTHER
    int kind  # what DLPack calls the dtype: tells apart also what is OTHER
    int device_type
    int device_id
    int contiguous
    int64_t* shape  # the tensor's own: valid as long as it lives
    int32_t ndim

cdef int read(object tensor, Buffer* buffer) except -1
cdef object allocate_like(Buffer* like, Buffer* made)
