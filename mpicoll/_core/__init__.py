"""Addresses, counts, MPI handles and requests; the GIL is released; knows nothing of autograd."""
