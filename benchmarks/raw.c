/* The yardstick: a C loop around MPI_Allreduce. */
#include <mpi.h>

double raw_allreduce(const float *send, float *recv, int count, int calls) {
  double start = MPI_Wtime();
  for (int i = 0; i < calls; i++)
    MPI_Allreduce(send, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  return MPI_Wtime() - start;
}
