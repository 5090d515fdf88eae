/* Memory for results, recycled.
 *
 * A third of the time of a large all-reduce into a new tensor goes into the kernel clearing fresh
 * pages; a block that comes back from a dead tensor has them. Blocks are handed to torch as DLPack
 * tensors whose deleter gives them back. Nothing here touches Python: a tensor may die on any
 * thread, with or without the GIL, and after the interpreter has ended. */
#ifndef MPICOLL_POOL_H
#define MPICOLL_POOL_H
#include "dlpack.h"

enum { POOL_MAX_NDIM = 16 };

/* A contiguous tensor of `shape`, uninitialised, or NULL where there is no memory for it or it has
 * more than POOL_MAX_NDIM dimensions. Its deleter returns the memory to the pool. */
DLManagedTensorVersioned *mpicoll_pool_tensor(const int64_t *shape, int32_t ndim, DLDataType dtype);

/* Keep at most this many bytes of unused blocks (0: none); returns the bytes kept now. */
size_t mpicoll_pool_limit(size_t bytes);
/* Bytes of unused blocks that are kept. */
size_t mpicoll_pool_kept(void);
#endif
