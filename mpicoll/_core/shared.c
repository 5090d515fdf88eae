#define _POSIX_C_SOURCE 200809L
#include "shared.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

/* Two slots: a rank that is done with a call may enter the next one while others still read; it
 * cannot enter a third before they have entered the second, and so have read the first. */
enum { LINE = 64, TINY = 16 };

typedef struct {
  _Atomic uint64_t turn;
  uint64_t call[2];
  char tiny[2][TINY]; /* data of one element: they arrive with the turn, in one cache line */
} Line;

_Static_assert(sizeof(Line) <= LINE, "a rank's news fit in a cache line");

static int64_t slot_bytes(int64_t limit) { return (limit + LINE - 1) / LINE * LINE; }

static int64_t stride_of(int64_t limit) { return LINE + 2 * slot_bytes(limit); }

static Line *line_of(const mpicoll_shared *s, int r) { return (Line *)(s->lines + r * s->stride); }

void *mpicoll_shared_map(int descriptor, int64_t size) {
  void *segment = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return segment == MAP_FAILED ? NULL : segment;
}

void mpicoll_shared_unmap(void *segment, int64_t size) { munmap(segment, (size_t)size); }

int64_t mpicoll_shared_bytes(int size, int kinds, int64_t limit) {
  return (int64_t)size * kinds * stride_of(limit);
}

void mpicoll_shared_open(mpicoll_shared *s, void *segment, int kind, int rank, int size,
                         int64_t limit) {
  s->stride = stride_of(limit);
  s->lines = (char *)segment + (int64_t)kind * size * s->stride;
  s->rank = rank;
  s->size = size;
  s->limit = limit;
  s->turn = 0;
  s->seen = 0;
}

static void *data_of(const mpicoll_shared *s, int r, int64_t nbytes) {
  int slot = s->turn & 1;
  if (nbytes <= TINY)
    return line_of(s, r)->tiny[slot];
  return (char *)line_of(s, r) + LINE + slot * slot_bytes(s->limit);
}

void mpicoll_shared_enter(mpicoll_shared *s, uint64_t call, const void *data, int64_t nbytes) {
  Line *mine = line_of(s, s->rank);
  s->turn++;
  s->seen = 0;
  mine->call[s->turn & 1] = call;
  if (nbytes)
    memcpy(data_of(s, s->rank, nbytes), data, nbytes);
  atomic_store_explicit(&mine->turn, s->turn, memory_order_release);
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

int mpicoll_shared_all_here(mpicoll_shared *s, int patience) {
  for (; s->seen < s->size; s->seen++)
    while (atomic_load_explicit(&line_of(s, s->seen)->turn, memory_order_acquire) < s->turn) {
      if (patience-- <= 0)
        return 0;
      pause_briefly();
    }
  return 1;
}

uint64_t mpicoll_shared_call(const mpicoll_shared *s, int r) {
  return line_of(s, r)->call[s->turn & 1];
}

int mpicoll_shared_agree(const mpicoll_shared *s) {
  uint64_t mine = mpicoll_shared_call(s, s->rank);
  for (int r = 0; r < s->size; r++)
    if (mpicoll_shared_call(s, r) != mine)
      return 0;
  return 1;
}

const void *mpicoll_shared_data(const mpicoll_shared *s, int r, int64_t nbytes) {
  return data_of(s, r, nbytes);
}

void mpicoll_shared_yield(void) { sched_yield(); }
