"""Which reductions have a gradient."""

import torch

import mpicoll

comm = mpicoll.COMM_WORLD

# The gradient of a maximum goes to the ranks that hold it. Here all do, and share it evenly.
x = torch.ones(1, requires_grad=True)
comm.Allreduce(x, mpicoll.MPI_MAX).sum().backward()
assert abs(x.grad.item() - 1.0) < 1e-6  # W losses, shared by W ranks

# The gradient of a product is right also where factors are zero.
x = torch.tensor([0.0 if comm.rank == 0 else 2.0], requires_grad=True)
comm.Allreduce(x, mpicoll.MPI_PROD).sum().backward()
assert x.grad.item() == (comm.size * 2.0 ** (comm.size - 1) if comm.rank == 0 else 0.0)

# A logical reduction has none, and says so before anything is sent.
try:
    comm.Allreduce(x, mpicoll.MPI_LOR)
except RuntimeError as error:
    print(f"rank {comm.rank}: {error}", flush=True)
else:
    raise AssertionError("MPI_LOR has no gradient")
assert comm.Allreduce(x.detach(), mpicoll.MPI_LOR).item() == float(comm.size > 1)
