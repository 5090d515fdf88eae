# cython: language_level=3
"""Tensors as memory: address, dtype, device and layout, through torch's DLPack C table."""

from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t

import torch

from mpicoll._core.mpi cimport OTHER

cdef extern from "dlpack.h" nogil:
    enum: kDLCPU
    enum: kDLInt, kDLUInt, kDLFloat, kDLBfloat, kDLComplex, kDLBool
    ctypedef struct DLDevice:
        int32_t device_type
        int32_t device_id
    ctypedef struct DLDataType:
        uint8_t code
        uint8_t bits
        uint16_t lanes
    ctypedef struct DLTensor:
        char* data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t* shape
        int64_t* strides
        long byte_offset
    ctypedef struct DLManagedTensorVersioned:
        DLTensor dl_tensor
    ctypedef struct DLPackVersion:
        int major
    ctypedef struct DLPackExchangeAPIHeader:
        DLPackVersion version
    ctypedef struct DLPackExchangeAPI:
        DLPackExchangeAPIHeader header
        int (*managed_tensor_allocator)(
            DLTensor*, DLManagedTensorVersioned**, void*,
            void (*)(void*, const char*, const char*) noexcept
        ) noexcept
        int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned*, void**) noexcept
        int (*dltensor_from_py_object_no_sync)(void*, DLTensor*) noexcept
        int (*current_work_stream)(int32_t, int32_t, void**) noexcept

cdef extern from "pool.h" nogil:
    DLManagedTensorVersioned* mpicoll_pool_tensor(const int64_t*, int32_t, DLDataType)
    size_t mpicoll_pool_limit(size_t)
    size_t mpicoll_pool_kept()

cdef extern from "Python.h":
    void Py_DECREF(PyObject*)

# Part of the contract with torch >= 2.10; a torch without it cannot be served.
cdef DLPackExchangeAPI* table = <DLPackExchangeAPI*>PyCapsule_GetPointer(
    torch.Tensor.__dlpack_c_exchange_api__, "dlpack_exchange_api"
)
if table.header.version.major != 1:
    raise ImportError(f"mpicoll reads DLPack 1.x; this torch speaks {table.header.version.major}")


cdef int _code(DLDataType dtype) noexcept:
    cdef int bits = dtype.bits
    if dtype.code == kDLFloat:
        return 11 if bits == 32 else 12 if bits == 64 else 9 if bits == 16 else OTHER
    if dtype.code == kDLInt:
        return 8 if bits == 64 else 6 if bits == 32 else 4 if bits == 16 else 2
    if dtype.code == kDLUInt:
        return 7 if bits == 64 else 5 if bits == 32 else 3 if bits == 16 else 1
    if dtype.code == kDLBfloat:
        return 10
    if dtype.code == kDLComplex:
        return 13 if bits == 64 else 14 if bits == 128 else OTHER
    if dtype.code == kDLBool:
        return 0
    return OTHER


cdef int _raise_if(int failed) except -1:
    return -1 if failed else 0  # torch has set the exception


cdef int _view(object tensor, DLTensor* view) except -1:
    return _raise_if(table.dltensor_from_py_object_no_sync(<PyObject*>tensor, view))


cdef int read(object tensor, Buffer* buffer) except -1:
    """Describe `tensor`'s memory. The caller has checked that it is a strided torch.Tensor."""
    cdef DLTensor view
    cdef int i
    cdef int64_t expected = 1
    cdef bint contiguous = True
    _view(tensor, &view)
    for i in range(view.ndim - 1, -1, -1):
        if view.shape[i] != 1:
            if view.strides != NULL and view.strides[i] != expected:
                contiguous = False
            expected *= view.shape[i]
    buffer.count = expected
    buffer.contiguous = contiguous or expected == 0
    buffer.data = view.data + view.byte_offset
    buffer.itemsize = (view.dtype.bits + 7) // 8
    buffer.dtype = _code(view.dtype)
    buffer.kind = view.dtype.code << 8 | view.dtype.bits
    buffer.device_type = view.device.device_type
    buffer.device_id = view.device.device_id
    buffer.shape = view.shape
    buffer.ndim = view.ndim
    return 0


cdef void _set_error(void* context, const char* kind, const char* message) noexcept with gil:
    (<list>context).append(f"{kind.decode()}: {message.decode()}")


cdef object _owned(DLManagedTensorVersioned* managed):
    """A torch.Tensor that owns `managed`."""
    cdef void* result = NULL
    _raise_if(table.managed_tensor_to_py_object_no_sync(managed, &result))
    cdef object made = <object><PyObject*>result
    Py_DECREF(<PyObject*>result)  # <object> took a reference beside the one torch gave
    return made


cdef DLManagedTensorVersioned* _managed(
    DLDataType dtype, DLDevice device, int64_t* shape, int32_t ndim
) except NULL:
    """Memory for a contiguous tensor: recycled on the CPU, torch's own elsewhere."""
    cdef DLManagedTensorVersioned* managed = NULL
    cdef DLTensor prototype
    cdef list errors
    if device.device_type == kDLCPU:
        managed = mpicoll_pool_tensor(shape, ndim, dtype)
    if managed == NULL:
        errors = []
        prototype.data = NULL
        prototype.device = device
        prototype.dtype = dtype
        prototype.shape = shape
        prototype.ndim = ndim
        prototype.strides = NULL
        prototype.byte_offset = 0
        if table.managed_tensor_allocator(&prototype, &managed, <void*>errors, _set_error) != 0:
            raise MemoryError("; ".join(errors))
    return managed


cdef object allocate_like(Buffer* like, Buffer* made):
    """A new contiguous tensor like the one that `like` describes, uninitialised; `made` is its."""
    cdef DLDataType dtype
    cdef DLDevice device
    cdef DLManagedTensorVersioned* managed
    dtype.code = like.kind >> 8
    dtype.bits = like.kind & 255
    dtype.lanes = 1
    device.device_type = like.device_type
    device.device_id = like.device_id
    managed = _managed(dtype, device, like.shape, like.ndim)
    made[0] = like[0]
    made.contiguous = True
    made.data = managed.dl_tensor.data + managed.dl_tensor.byte_offset
    made.shape = managed.dl_tensor.shape
    return _owned(managed)


def empty(shape, like):
    """A new contiguous tensor of `shape`, with the dtype and device of `like`, uninitialised."""
    cdef DLTensor view
    cdef int64_t sizes[64]
    cdef int ndim = len(shape), i
    if ndim > 64:
        raise ValueError(f"a tensor has at most 64 dimensions, not {ndim}")
    for i in range(ndim):
        sizes[i] = shape[i]
    _view(like, &view)
    return _owned(_managed(view.dtype, view.device, sizes, ndim))


def pool(limit=None):
    """Set how many bytes of unused result memory are kept, if given; return how many are."""
    if limit is not None:
        return mpicoll_pool_limit(limit)
    return mpicoll_pool_kept()


def describe(tensor):
    """Count, item size, dtype code, device type, device index and contiguity of `tensor`."""
    cdef Buffer buffer
    read(tensor, &buffer)
    return (
        buffer.count, buffer.itemsize, buffer.dtype, buffer.device_type, buffer.device_id,
        bool(buffer.contiguous),
    )


def is_contiguous(tensor):
    """Whether the elements of `tensor` lie in row-major order without gaps."""
    cdef Buffer buffer
    read(tensor, &buffer)
    return bool(buffer.contiguous)
