/* The part of the public DLPack header (version 1.3) that mpicoll reads tensors with:
 * https://github.com/dmlc/dlpack, Apache License 2.0. */
#ifndef MPICOLL_DLPACK_H
#define MPICOLL_DLPACK_H
#include <stddef.h>
#include <stdint.h>

enum { kDLCPU = 1, kDLCUDAHost = 3, kDLROCMHost = 11 };
enum { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLComplex = 5, kDLBool = 6 };

typedef struct { uint32_t major, minor; } DLPackVersion;
typedef struct { int32_t device_type; int32_t device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides;
  uint64_t byte_offset;
} DLTensor;
typedef struct DLManagedTensorVersioned {
  DLPackVersion version;
  void *manager_ctx;
  void (*deleter)(struct DLManagedTensorVersioned *self);
  uint64_t flags;
  DLTensor dl_tensor;
} DLManagedTensorVersioned;
typedef struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  struct DLPackExchangeAPIHeader *prev_api;
} DLPackExchangeAPIHeader;
typedef struct {
  DLPackExchangeAPIHeader header;
  int (*managed_tensor_allocator)(DLTensor *prototype, DLManagedTensorVersioned **out,
                                  void *error_ctx,
                                  void (*set_error)(void *, const char *, const char *));
  int (*managed_tensor_from_py_object_no_sync)(void *, DLManagedTensorVersioned **);
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned *, void **);
  int (*dltensor_from_py_object_no_sync)(void *, DLTensor *);
  int (*current_work_stream)(int32_t, int32_t, void **);
} DLPackExchangeAPI;
#endif
