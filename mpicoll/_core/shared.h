/* Short messages between ranks that share memory.
 *
 * One segment serves one communicator whose ranks are all on one node. Every rank has in it, for
 * each kind of traffic, a line that the others read: the number of the last call it entered, what
 * that call was, and its data if they are short. A call waits for all ranks and reads what it
 * needs; nobody writes what another writes, so there is no lock.
 *
 * Plain C11: no Python, no MPI. */
#ifndef MPICOLL_SHARED_H
#define MPICOLL_SHARED_H

#include <stdint.h>

enum { MPICOLL_SHARED_RANKS = 32 }; /* beyond, reading every rank's line costs more than MPI */

typedef struct {
  char *lines; /* of rank 0; NULL: this communicator shares no memory */
  int rank, size;
  int64_t limit;  /* the longest data, bytes */
  int64_t stride; /* from one rank's line to the next */
  uint64_t turn;  /* the number of the last call that this rank entered */
  int seen;       /* ranks that are known to be in it */
} mpicoll_shared;

/* Map `size` bytes of an open file, which may be closed then; NULL where that fails (errno). */
void *mpicoll_shared_map(int descriptor, int64_t size);
void mpicoll_shared_unmap(void *segment, int64_t size);

/* Bytes of a segment for so many ranks and kinds of traffic. It starts as zeros. */
int64_t mpicoll_shared_bytes(int size, int kinds, int64_t limit);

/* Describe the lines of one kind of traffic in a segment that starts at an address with
 * alignment 64. */
void mpicoll_shared_open(mpicoll_shared *s, void *segment, int kind, int rank, int size,
                         int64_t limit);

/* Enter the next call: show what it is and the data (at most `limit` bytes). All ranks must have
 * been found in the call before (mpicoll_shared_all_here). */
void mpicoll_shared_enter(mpicoll_shared *s, uint64_t call, const void *data, int64_t nbytes);

/* Whether all ranks have entered this call; looks at most `patience` times more than needed. */
int mpicoll_shared_all_here(mpicoll_shared *s, int patience);

/* Whether all ranks, which are here, said the same of the call. */
int mpicoll_shared_agree(const mpicoll_shared *s);

/* What rank r said of the call, and its data: valid until this rank enters the next call. */
uint64_t mpicoll_shared_call(const mpicoll_shared *s, int r);
const void *mpicoll_shared_data(const mpicoll_shared *s, int r, int64_t nbytes);

/* Let another process have the processor. */
void mpicoll_shared_yield(void);
#endif
