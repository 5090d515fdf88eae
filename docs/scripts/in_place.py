"""Calls that work in place."""

import torch

import mpicoll

comm = mpicoll.COMM_WORLD

# A call with a trailing underscore writes into the tensor it is given, whatever its strides ...
table = torch.full((3, 2), float(comm.rank))
comm.Bcast_(table[:, 0], comm.size - 1)
assert table[:, 0].tolist() == [comm.size - 1.0] * 3
assert table[:, 1].tolist() == [float(comm.rank)] * 3

# ... and a tensor that was overwritten is of no use to the graph any more. Use the result.
x = torch.ones(2, requires_grad=True)
squared = x**2
reduced = comm.Reduce_(squared, mpicoll.MPI_SUM, 0)
try:
    (squared + reduced).sum().backward()
except RuntimeError as error:
    print(f"rank {comm.rank}: {error}", flush=True)
else:
    raise AssertionError("the reuse went unnoticed")
