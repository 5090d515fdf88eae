"""A loss that every rank computes alike counts once per rank."""

import torch

import mpicoll

comm = mpicoll.COMM_WORLD
total = sum(r + 1 for r in range(comm.size))


def parameter():
    return torch.ones((), dtype=torch.float64, requires_grad=True)


# 1. Every rank takes the same sum as its loss: the objective is W times the sum.
p = parameter()
loss = comm.Allreduce((comm.rank + 1) * p, mpicoll.MPI_SUM)
loss.backward()
assert p.grad.item() == comm.size * (comm.rank + 1)

# 2. Every rank's loss is its own share: the objective is the sum. The gradient is that with
#    respect to this rank's p; the other ranks' p are other variables.
p = parameter()
loss = (comm.rank + 1) * p
loss.backward()
assert p.grad.item() == comm.rank + 1

# 3. p is one parameter, of which every rank holds a copy: add up the gradients of all copies.
p = parameter()
loss = (comm.rank + 1) * mpicoll.copy_to_group(p)
loss.backward()
assert p.grad.item() == total

# 4. As 3, with the sum at hand on every rank, and still counted once.
p = parameter()
loss = mpicoll.reduce_from_group((comm.rank + 1) * mpicoll.copy_to_group(p))
loss.backward()
assert loss.item() == total
assert p.grad.item() == total
