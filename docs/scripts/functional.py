"""The functions with the names of torch.distributed."""

import torch

import mpicoll
import mpicoll.nn.functional as F

rank, size = mpicoll.COMM_WORLD.rank, mpicoll.COMM_WORLD.size

x = torch.full((2,), rank + 1.0, requires_grad=True)
average = F.all_reduce(x, mpicoll.ReduceOp.AVG)
blocks = F.all_gather(x)  # a tuple with one tensor per rank
first = F.broadcast(x, 0)

assert average[0].item() == (size + 1) / 2
assert [block[0].item() for block in blocks] == [r + 1.0 for r in range(size)]
assert first[0].item() == 1.0

# Each of the three has its own part in the gradient.
(average + sum(blocks) + first).sum().backward()
from_average = 1.0  # size ranks use it, each with the weight 1 / size
from_blocks = float(size)  # size ranks use this rank's block
from_first = float(size) if rank == 0 else 0.0
assert x.grad.tolist() == [from_average + from_blocks + from_first] * 2
