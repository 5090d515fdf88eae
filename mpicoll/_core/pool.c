#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

enum {
  STEPS = 8,                       /* size classes in each power of two: 12.5 % waste at most */
  CLASSES = 64 * STEPS,
  SMALLEST = 64,                   /* a cache line, also the alignment */
};
static const size_t MAPPED = 1 << 20; /* from here on blocks are mapped, not malloc'ed */
static const size_t HUGE_PAGE = 2 << 20;

typedef struct Block {
  DLManagedTensorVersioned tensor;
  int64_t shape[POOL_MAX_NDIM];
  int64_t strides[POOL_MAX_NDIM];
  void *data;
  size_t capacity;
  int kind;                        /* its size class */
  struct Block *next;
} Block;

static Block *unused[CLASSES];
static size_t kept, limit = (size_t)512 << 20;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A fork in the middle of a call leaves the child with a usable pool. */
static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork(void) { pthread_mutex_unlock(&lock); }
static void set_up(void) { pthread_atfork(before_fork, after_fork, after_fork); }

/* The size class of `bytes`, and its size: m * 2^k with STEPS <= m < 2 * STEPS. */
static int class_of(size_t bytes, size_t *capacity) {
  if (bytes < SMALLEST) bytes = SMALLEST;
  int k = 63 - __builtin_clzll(bytes);
  size_t step = ((size_t)1 << k) / STEPS;
  size_t m = (bytes + step - 1) / step; /* STEPS..2*STEPS */
  *capacity = m * step;
  return k * STEPS + (int)(m - STEPS); /* m == 2*STEPS is the first class of k + 1 */
}

static void destroy(Block *block) {
  if (block->capacity >= MAPPED) munmap(block->data, block->capacity);
  else free(block->data);
  free(block);
}

static Block *create(int kind, size_t capacity) {
  Block *block = malloc(sizeof(Block));
  if (!block) return NULL;
  if (capacity >= MAPPED) {
    block->data = mmap(NULL, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block->data == MAP_FAILED) block->data = NULL;
#ifdef MADV_HUGEPAGE
    else if (capacity >= 2 * HUGE_PAGE) madvise(block->data, capacity, MADV_HUGEPAGE);
#endif
  } else if (posix_memalign(&block->data, SMALLEST, capacity)) {
    block->data = NULL;
  }
  if (!block->data) {
    free(block);
    return NULL;
  }
  block->capacity = capacity;
  block->kind = kind;
  return block;
}

static void give_back(DLManagedTensorVersioned *tensor) {
  Block *block = tensor->manager_ctx;
  pthread_mutex_lock(&lock);
  int keep = kept + block->capacity <= limit;
  if (keep) {
    kept += block->capacity;
    block->next = unused[block->kind];
    unused[block->kind] = block;
  }
  pthread_mutex_unlock(&lock);
  if (!keep) destroy(block);
}

DLManagedTensorVersioned *mpicoll_pool_tensor(const int64_t *shape, int32_t ndim,
                                              DLDataType dtype) {
  size_t capacity, bytes = (dtype.bits + 7) / 8;
  if (ndim > POOL_MAX_NDIM) return NULL;
  for (int i = 0; i < ndim; i++)
    if (__builtin_mul_overflow(bytes, (size_t)shape[i], &bytes)) return NULL;
  if (bytes >= (size_t)1 << 60) return NULL;
  pthread_once(&once, set_up);
  int kind = class_of(bytes, &capacity);
  pthread_mutex_lock(&lock);
  Block *block = unused[kind];
  if (block) {
    unused[kind] = block->next;
    kept -= block->capacity;
  }
  pthread_mutex_unlock(&lock);
  if (!block && !(block = create(kind, capacity))) return NULL;
  int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; i--) {
    block->shape[i] = shape[i];
    block->strides[i] = stride;
    stride *= shape[i] > 0 ? shape[i] : 1;
  }
  DLManagedTensorVersioned *tensor = &block->tensor;
  tensor->version.major = 1;
  tensor->version.minor = 1;
  tensor->manager_ctx = block;
  tensor->deleter = give_back;
  tensor->flags = 0;
  tensor->dl_tensor.data = block->data;
  tensor->dl_tensor.device.device_type = kDLCPU;
  tensor->dl_tensor.device.device_id = 0;
  tensor->dl_tensor.ndim = ndim;
  tensor->dl_tensor.dtype = dtype;
  tensor->dl_tensor.shape = block->shape;
  tensor->dl_tensor.strides = block->strides;
  tensor->dl_tensor.byte_offset = 0;
  return tensor;
}

size_t mpicoll_pool_limit(size_t bytes) {
  pthread_mutex_lock(&lock);
  limit = bytes;
  Block *surplus = NULL;
  for (int kind = CLASSES - 1; kind >= 0 && kept > limit; kind--) {
    while (unused[kind] && kept > limit) { /* the largest first */
      Block *block = unused[kind];
      unused[kind] = block->next;
      kept -= block->capacity;
      block->next = surplus;
      surplus = block;
    }
  }
  size_t now = kept;
  pthread_mutex_unlock(&lock);
  while (surplus) {
    Block *block = surplus;
    surplus = block->next;
    destroy(block);
  }
  return now;
}

size_t mpicoll_pool_kept(void) {
  pthread_mutex_lock(&lock);
  size_t now = kept;
  pthread_mutex_unlock(&lock);
  return now;
}
