"""A parameter recovered through a domain-decomposed solver: the heat equation in two dimensions.

Run it with ``mpiexec -n W python examples/heat.py`` for any W up to the number of rows. The rows
of the grid are shared out over the ranks, which exchange their edge rows in every time step; the
diffusivity is found by gradient descent through that exchange, from the final temperature alone.
``--check`` compares the first loss and gradient with those of one process, without mpicoll.
"""

import click
import torch
from torch.nn.functional import pad

import mpicoll

UP, DOWN = 0, 1  # message tags: the direction of travel
TRUTH, GUESS = 0.7, 0.2


def with_neighbours_isend(comm, field, above, below):
    """Return ``field`` with the facing edge rows of the ranks above and below, by Isend/Irecv.

    ``above`` and ``below`` are ranks, or None at the edge of the grid: then nothing is sent, and
    the received row keeps its zeros. Those are the boundary values.

    The backward of each call talks to the rank that the call talked to, so each must run on every
    rank, and none may wait before its partner has been started. The dummies say so: the chain is
    send, receive, wait for the receive, wait for the send, and backward runs it from the far end.
    """
    sent_up = comm.Isend(field[:1], above, UP)
    sent_down = comm.Isend(field[-1:], below, DOWN)

    sends = [sent_up.dummy, sent_down.dummy]
    edge = torch.zeros_like(field[:1])
    from_above = comm.Irecv(mpicoll.JoinDummies(edge.clone(), sends), above, DOWN)
    from_below = comm.Irecv(mpicoll.JoinDummies(edge.clone(), sends), below, UP)
    received = [comm.Wait(from_above), comm.Wait(from_below)]

    done_up = comm.Wait(mpicoll.JoinDummiesHandle(sent_up, received))
    done_down = comm.Wait(mpicoll.JoinDummiesHandle(sent_down, received))
    padded = torch.cat([received[0], field, received[1]])
    return mpicoll.JoinDummies(padded, [done_up, done_down])


def with_neighbours_sendrecv(comm, field, above, below):
    """Return the same by Sendrecv: its backward is the reversed Sendrecv, without dummies."""
    edge = torch.zeros_like(field[:1])
    from_above = comm.Sendrecv(field[-1:], below, edge.clone(), above)
    from_below = comm.Sendrecv(field[:1], above, edge.clone(), below)
    return torch.cat([from_above, field, from_below])


EXCHANGES = {"isend": with_neighbours_isend, "sendrecv": with_neighbours_sendrecv}


def step(padded, diffusivity):
    """One explicit Euler step; ``padded`` has one more row on either side than the result."""
    field = padded[1:-1]
    wide = pad(field, (1, 1))  # zeros at the left and right boundary
    laplacian = padded[:-2] + padded[2:] + wide[:, :-2] + wide[:, 2:] - 4 * field
    return field + 0.25 * diffusivity * laplacian  # stable up to a diffusivity of 1


def initial(rows, columns):
    """Return the initial temperature of the whole grid: two warm spots."""
    y = torch.linspace(0, 1, rows, dtype=torch.float64)[:, None]
    x = torch.linspace(0, 1, columns, dtype=torch.float64)[None, :]
    return torch.exp(-60 * ((y - 0.4) ** 2 + (x - 0.3) ** 2)) + 0.5 * torch.exp(
        -90 * ((y - 0.7) ** 2 + (x - 0.6) ** 2)
    )


def solve(comm, field, diffusivity, steps, exchange):
    """Return this rank's rows of the temperature after ``steps`` time steps."""
    above = comm.rank - 1 if comm.rank > 0 else None
    below = comm.rank + 1 if comm.rank < comm.size - 1 else None
    for _ in range(steps):
        field = step(exchange(comm, field, above, below), diffusivity)
    return field


def loss_and_gradient(comm, log_diffusivity, field, target, scale, steps, exchange):
    """Return the loss of the whole grid and its derivative, the same numbers on every rank."""
    parameter = log_diffusivity.clone().requires_grad_()
    # Every rank uses the same parameter, so the gradients of all ranks are to be added up. That is
    # the backward of copy_to_group; its forward is the identity.
    diffusivity = mpicoll.copy_to_group(parameter, comm).exp()
    result = solve(comm, field, diffusivity, steps, exchange)
    # The objective is the sum of all ranks' losses; this rank's loss is that of its own rows.
    loss = ((result - target) ** 2).sum() / scale
    loss.backward()
    return comm.Allreduce(loss.detach(), mpicoll.MPI_SUM), parameter.grad


def loss_and_gradient_alone(log_diffusivity, whole, steps):
    """Return the same from one process: the oracle of ``--check``."""

    def run(diffusivity):
        field = whole
        for _ in range(steps):
            field = step(pad(field, (0, 0, 1, 1)), diffusivity)
        return field

    parameter = log_diffusivity.clone().requires_grad_()
    target = run(TRUTH)
    loss = ((run(parameter.exp()) - target) ** 2).sum() / (target**2).sum()
    loss.backward()
    return loss.detach(), parameter.grad


def compare(comm, first, whole, steps):
    """Return how far the first loss and gradient are from those of one process."""
    difference = torch.zeros((), dtype=torch.float64)
    if comm.rank == 0:
        guess = torch.tensor(GUESS, dtype=torch.float64).log()
        alone = torch.stack(loss_and_gradient_alone(guess, whole, steps))
        difference = ((torch.stack(first) - alone) / alone).abs().max()
    return comm.Bcast_(difference, 0).item()  # all ranks come to the same verdict


@click.command(help=__doc__)
@click.option("--rows", default=41, show_default=True, type=click.IntRange(min=1))
@click.option("--columns", default=33, show_default=True, type=click.IntRange(min=1))
@click.option("--steps", default=40, show_default=True, type=click.IntRange(min=1))
@click.option("--iterations", default=20, show_default=True, type=click.IntRange(min=1))
@click.option("--exchange", default="isend", show_default=True, type=click.Choice(list(EXCHANGES)))
@click.option("--check", is_flag=True, help="Compare with one process.")
def main(rows, columns, steps, iterations, exchange, check):
    torch.set_num_threads(1)  # the ranks share the cores
    comm = mpicoll.COMM_WORLD
    if rows < comm.size:
        raise click.BadParameter(f"{comm.size} ranks need at least {comm.size} rows, not {rows}")
    exchange = EXCHANGES[exchange]

    whole = initial(rows, columns)
    field = whole.tensor_split(comm.size)[comm.rank]  # sizes differ by one row at most
    with torch.no_grad():
        target = solve(comm, field, TRUTH, steps, exchange)
        scale = comm.Allreduce((target**2).sum(), mpicoll.MPI_SUM)

    log_diffusivity = torch.tensor(GUESS, dtype=torch.float64).log()
    first = None
    for iteration in range(iterations):
        loss, gradient = loss_and_gradient(
            comm, log_diffusivity, field, target, scale, steps, exchange
        )
        first = first or (loss, gradient)
        if comm.rank == 0:
            found = log_diffusivity.exp().item()
            print(f"iteration {iteration:2d}: loss {loss.item():.3e}, diffusivity {found:.6f}")
        log_diffusivity = log_diffusivity - 2.0 * gradient

    found = log_diffusivity.exp().item()
    if comm.rank == 0:
        print(f"{comm.size} rank(s): diffusivity {found:.6f}, truth {TRUTH}", flush=True)

    if check:
        difference = compare(comm, first, whole, steps)
        if comm.rank == 0:
            print(f"relative difference from one process: {difference:g}", flush=True)
        if not difference < 1e-12:
            raise SystemExit("loss or gradient differ from one process" if comm.rank == 0 else 1)
        if not abs(found - TRUTH) < 1e-3:
            raise SystemExit("not recovered in this many iterations" if comm.rank == 0 else 1)


if __name__ == "__main__":
    main()
