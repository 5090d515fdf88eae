"""Messages between two ranks that were sent before a Join: their gradients are refused in it."""

from __future__ import annotations

import pytest
import torch
from groups import several

from mpicoll.algorithms import Join


def message(world, x):
    if world.rank == 0:
        return world.Send(x, 1, 5)
    return world.Recv(torch.zeros(2), 0, 5) if world.rank == 1 else x


def ring(world, x):
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    return world.Sendrecv(x, right, torch.zeros(2), left)


@several
@pytest.mark.parametrize(("send", "gradient"), [(message, 2.0), (ring, 1.0)])
@pytest.mark.parametrize("all_are_there", [True, False])
def test_gradient_of_a_message(world, works, send, gradient, all_are_there):
    """Also where the other rank has run out, and would never answer."""
    x = torch.ones(2, requires_grad=True)
    y = send(world, x)
    refused = r"the gradient of .* cannot be shadowed"
    with pytest.raises(RuntimeError, match=refused), Join([world]):  # noqa: PT012
        if world.rank == 0 or (all_are_there and world.rank == 1):
            y.sum().backward()
    works()
    x.grad = None
    send(world, x).sum().backward()
    if world.rank == 0:  # Send gives its tensor back, so its own loss counts, too
        assert torch.equal(x.grad, torch.full((2,), gradient))
