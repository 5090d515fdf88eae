"""Every rank runs the backward of a gather, also those that have no use for the result."""

import torch

import mpicoll

comm = mpicoll.COMM_WORLD

x = torch.tensor([comm.rank + 1.0], requires_grad=True)
everything = comm.Gather(x, 0, 0)  # off the root: a tensor of size 0 that is part of the graph

# Off the root the loss is the sum of nothing: 0, but with a backward.
loss = (everything**2).sum() if comm.rank == 0 else everything.sum()
loss.backward()
assert x.grad.item() == 2 * (comm.rank + 1.0)
