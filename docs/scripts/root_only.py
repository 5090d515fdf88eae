"""A result that only one rank uses, kept in the graph of the others by JoinDummies."""

import torch

import mpicoll

comm = mpicoll.COMM_WORLD

x = torch.tensor([comm.rank + 1.0], requires_grad=True)
y = comm.Allreduce(x**2, mpicoll.MPI_SUM)

loss = (3 * y).sum() if comm.rank == 0 else torch.zeros(())
# Rank 0 uses y anyway. On the others this line adds y to the graph of the loss, with a gradient
# of zero; without it rank 0 would wait for them in backward for ever.
loss = mpicoll.JoinDummies(loss, [y])
loss.backward()

assert x.grad.item() == 3 * 2 * x.item()
