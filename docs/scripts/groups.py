"""Subgroups, and the way to mpi4py and back."""

import torch
from mpi4py import MPI

import mpicoll

world = mpicoll.COMM_WORLD

# Ranks of the same colour form a group, ordered by key. Roots are ranks in the group.
half = world.Split(world.rank % 2, key=-world.rank)
x = torch.tensor([float(world.rank)])
highest = half.Bcast(x, 0)
assert highest.item() == max(r for r in range(world.size) if r % 2 == world.rank % 2)
half.Free()

# A communicator of mpi4py serves as one of mpicoll, and the other way round.
comm = mpicoll.comm_from_mpi4py(MPI.COMM_WORLD)
assert comm.Allreduce(x, mpicoll.MPI_SUM).item() == sum(range(comm.size))
assert world.to_mpi4py().allreduce(1) == world.size
