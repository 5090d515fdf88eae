"""A ring of point-to-point messages with hand-made dependencies, as written for mpi4torch."""

import torch

import mpicoll as mpi4torch

comm = mpi4torch.COMM_WORLD
left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size

own = torch.tensor([comm.rank + 1.0], requires_grad=True)

handle = comm.Isend(own, right, 0)
# The receive comes after the send ...
buffer = mpi4torch.JoinDummies(torch.empty_like(own), [handle.dummy])
received = comm.Recv(buffer, left, 0)
# ... the wait for the send comes after the receive ...
sent = comm.Wait(mpi4torch.JoinDummiesHandle(handle, [received]))
# ... and the result comes after that wait.
result = mpi4torch.JoinDummies(own + received, [sent])

result.sum().backward()

assert result.item() == own.item() + left + 1.0
# This rank's value is used twice: by itself, and by its right neighbour.
assert own.grad.item() == 2.0
