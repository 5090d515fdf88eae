"""Sizes may differ from rank to rank along the axis that is gathered or scattered."""

import torch

import mpicoll

comm = mpicoll.COMM_WORLD
total = sum(r + 1 for r in range(comm.size))

# Rank r holds r + 1 columns; everybody gets all of them, in rank order.
mine = torch.full((2, comm.rank + 1), float(comm.rank), requires_grad=True)
everything = comm.Allgather(mine, 1)
assert everything.shape == (2, total)
assert everything[0].tolist() == [float(r) for r in range(comm.size) for _ in range(r + 1)]

# The root's tensor is cut; rank r says how much it wants. The others' tensors are placeholders.
whole = torch.arange(float(total)) if comm.rank == 0 else torch.empty(0)
part = comm.Scatter(whole, 0, comm.rank + 1, 0)
assert part.tolist() == [float(i + comm.rank * (comm.rank + 1) // 2) for i in range(comm.rank + 1)]

# One distributed axis, shared out anew: now rank r holds size - r elements.
again = comm.Alltoall(part, 0, 0, comm.size - comm.rank)
assert again.shape == (comm.size - comm.rank,)
