/* How mpicoll reaches the MPI library that mpi4py has loaded: no <mpi.h>, no -lmpi. */
#ifndef MPICOLL_MPI_LOAD_H
#define MPICOLL_MPI_LOAD_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

typedef union { int i; void *p; } mpi_handle;           /* any MPI handle, of either ABI */
typedef struct { long long opaque[8]; } mpi_status;     /* >= sizeof(MPI_Status) of every ABI */
typedef void mpi_user_function(void *, void *, int *, void *);

/* mpi4py's extension module is already loaded: take its handle, load nothing. */
static inline void *mpi_open(const char *path) { return dlopen(path, RTLD_LAZY | RTLD_NOLOAD); }
static inline const char *mpi_open_error(void) { return dlerror(); }

/* A preloaded PMPI tool wins, as it does for mpi4py; else mpi4py's own dependency. */
static inline void *mpi_symbol(void *library, const char *name) {
  void *address = dlsym(RTLD_DEFAULT, name);
  return address ? address : dlsym(library, name);
}

/* The file that an address was loaded from, or NULL. */
static inline const char *mpi_where(void *address) {
  Dl_info info;
  return address && dladdr(address, &info) ? info.dli_fname : NULL;
}
#endif
