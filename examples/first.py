"""The first script: one all-reduce, differentiated.

Run it with ``mpiexec -n W python examples/first.py``. Every rank prints its own line, so the
order of the lines may vary from run to run.
"""

import torch

import mpicoll

comm = mpicoll.COMM_WORLD

x = torch.ones((), dtype=torch.float64, requires_grad=True)
y = comm.Allreduce((comm.rank + 2) * x, mpicoll.MPI_SUM)
y.backward()

print(f"rank {comm.rank} of {comm.size}: y = {y.item():g}, dL/dx = {x.grad.item():g}", flush=True)

# y = sum over all ranks r of (r + 2) * x_r. Every rank takes its own copy of y as its loss, so
# the objective is L = W * y and its derivative with respect to this rank's x is W * (rank + 2).
assert y.item() == sum(r + 2 for r in range(comm.size))
assert x.grad.item() == comm.size * (comm.rank + 2)
