"""Import, initialisation and exit: each in processes of its own."""

from __future__ import annotations

import re

import pytest
from launcher import python

USE = """
import torch, mpicoll
x = mpicoll.COMM_WORLD.Allreduce(torch.ones(2), mpicoll.MPI_SUM)
assert x.tolist() == [mpicoll.COMM_WORLD.size] * 2, x
"""


def test_import_does_not_initialise_mpi():
    python("""
        import sys
        import torch, mpicoll, mpicoll.nn.functional
        assert "mpi4py.MPI" not in sys.modules
        assert not torch.cuda.is_initialized()
        assert "not used yet" in repr(mpicoll.COMM_WORLD)
        mpicoll.JoinDummies(torch.ones(1), [])
        assert "mpi4py.MPI" not in sys.modules
        mpicoll.COMM_WORLD.size
        from mpi4py import MPI
        assert MPI.Is_initialized()
    """).check()


def test_import_brings_nothing_heavy():
    """What `import mpicoll` loads beyond torch and mpi4py is mpicoll."""
    heavy = (
        "mpi4py.MPI", "torch._dynamo", "torch._inductor", "sympy", "click", "rich", "pluggy",
        "torch.distributed._tensor", "torch.distributed.tensor", "torch.distributed.fsdp",
        "torch.distributed.nn", "torch.testing", "scipy", "sklearn",
    )  # fmt: skip
    done = python(f"""
        import sys
        import torch, mpi4py
        before = set(sys.modules)
        import mpicoll
        new = set(sys.modules) - before
        assert "mpicoll" in new
        wrong = [m for m in new if any(m == h or m.startswith(h + ".") for h in {heavy!r})]
        assert not wrong, wrong
        print(sorted(m.partition(".")[0] for m in new))
    """).check()
    assert "mpicoll" in done.out


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize(
    "first",
    [
        "import mpicoll, torch; from mpi4py import MPI",
        "from mpi4py import MPI; import mpicoll, torch",
    ],
)
def test_order_of_imports(first, ranks):
    """Without mpiexec the process is alone."""
    python(
        f"{first}\nassert mpicoll.COMM_WORLD.size == {max(ranks, 1)}\n{USE}", ranks=ranks
    ).check()


def test_not_initialised():
    """mpi4py.rc.initialize=False: a clear error at the first use, and all is well after Init."""
    python("""
        import mpi4py
        mpi4py.rc.initialize = False
        import torch, mpicoll
        for use in (lambda: mpicoll.COMM_WORLD.Allreduce(torch.ones(1), mpicoll.MPI_SUM),
                    lambda: mpicoll.COMM_WORLD.rank, mpicoll.COMM_WORLD.Barrier,
                    lambda: mpicoll.nn.functional.all_reduce(torch.ones(1))):
            try:
                use()
            except RuntimeError as error:
                assert "mpi4py.rc.initialize is False" in str(error), error
                assert "Init" in str(error)
            else:
                raise SystemExit("no error")
        from mpi4py import MPI
        assert not MPI.Is_initialized()
        MPI.Init()
        assert mpicoll.COMM_WORLD.Allreduce(torch.ones(1), mpicoll.MPI_SUM).item() == 1
        MPI.Finalize()
    """).check()


@pytest.mark.parametrize("level", ["single", "funneled", "serialized", "multiple"])
def test_thread_levels(level):
    python(
        f"""
        import mpi4py
        mpi4py.rc.thread_level = {level!r}
        import torch, mpicoll
        comm = mpicoll.COMM_WORLD
        x = torch.ones(3, requires_grad=True)
        y = comm.Allreduce(x, mpicoll.MPI_SUM)
        y.sum().backward()
        assert x.grad.tolist() == [2.0] * 3
        from mpi4py import MPI
        assert MPI.Query_thread() >= MPI.THREAD_{level.upper()}
    """,
        ranks=2,
    ).check()


def test_finalized_by_hand():
    python(
        """
        import torch, mpicoll
        from mpi4py import MPI
        comm = mpicoll.COMM_WORLD
        dup = comm.Dup()
        x = torch.ones(3, requires_grad=True)
        y = comm.Allreduce(x, mpicoll.MPI_SUM)
        dup.Free()
        MPI.Finalize()
        for use in (lambda: comm.Allreduce(torch.ones(1), mpicoll.MPI_SUM), comm.Barrier,
                    lambda: comm.Send(torch.ones(1), 0, 0), lambda: comm.Split(0), comm.Dup,
                    lambda: comm.Scatter(torch.ones(2), 0, 1, 0),
                    lambda: mpicoll.nn.functional.broadcast(torch.ones(1), 0),
                    lambda: mpicoll.COMM_SELF.size and mpicoll.COMM_SELF.Barrier(),
                    lambda: y.sum().backward()):
            try:
                use()
            except RuntimeError as error:
                assert "MPI has been finalized" in str(error), error
            else:
                raise SystemExit("no error")
    """,
        ranks=2,
    ).check()


def test_things_alive_at_exit():
    """Communicators, graphs, receives that nothing matches and sends that arrive: exit code 0."""
    done = python(
        """
        import torch, mpicoll
        from mpi4py import MPI
        comm = mpicoll.COMM_WORLD
        other = 1 - comm.rank
        dup = comm.Dup()
        half = comm.Split(comm.rank)
        theirs = mpicoll.comm_from_mpi4py(MPI.COMM_WORLD.Dup())
        x = torch.ones(3, requires_grad=True)
        graph = dup.Allreduce(x, mpicoll.MPI_SUM)
        pair = dup.Sendrecv(x, other, torch.empty(3), other)
        never = comm.Irecv(torch.empty(3), other, 7)
        handle = comm.Isend(torch.ones(3), other, 8)
        comm.Recv(torch.empty(3), other, 8)
        lost = dup.Irecv(torch.empty(3), other, 7)
        del lost
        print(f"end of {comm.rank};", end="", flush=True)  # one write: never torn
    """,
        ranks=2,
    ).check()
    assert sorted(re.findall(r"end of \d;", done.out)) == ["end of 0;", "end of 1;"]
    assert "Traceback" not in done.err
    assert "Exception" not in done.err


def test_dropped_handle_is_reported_and_exits_with_0():
    """pytorch#11630: a ResourceWarning, no crash."""
    done = python(
        """
        import torch, mpicoll
        comm = mpicoll.COMM_WORLD
        other = 1 - comm.rank
        handle = comm.Isend(torch.ones(3), other, 0)
        comm.Irecv(torch.empty(3), other, 1)
        del handle
        comm.Recv(torch.empty(3), other, 0)
    """,
        "-W",
        "always::ResourceWarning",
        ranks=2,
    ).check()
    assert done.err.count("ResourceWarning: mpicoll: Isend with rank") == 2
    assert done.err.count("ResourceWarning: mpicoll: Irecv with rank") == 2
    assert "Traceback" not in done.err


def test_unreceived_gradient_is_reported_at_exit():
    """The result of a send never reached the loss: said at exit, on the rank that missed it."""
    done = python(
        """
        import torch, mpicoll
        comm = mpicoll.COMM_WORLD
        x = torch.ones(1, requires_grad=True)
        if comm.rank == 0:
            comm.Send(x, 1, 0)
        else:
            comm.Recv(torch.empty(1), 0, 0).sum().backward()
        comm.Barrier()
    """,
        "-W",
        "always::ResourceWarning",
        ranks=2,
    ).check()
    # The name of the communicator is the library's.
    assert done.err.count("COMM_WORLD has a gradient message that no node received") == 1
    assert done.err.count("rank 0 of ") == 1


def test_dataloader_with_spawned_workers(tmp_path):
    """pytorch#33943: the workers import mpicoll and never touch MPI."""
    (tmp_path / "data_of_the_test.py").write_text(
        "import torch, mpicoll\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return torch.tensor([float(i)])\n"
    )
    python(
        f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import torch, mpicoll
        from data_of_the_test import Data
        if __name__ == "__main__":
            comm = mpicoll.COMM_WORLD
            comm.Barrier()
            loader = torch.utils.data.DataLoader(
                Data(), batch_size=4, num_workers=2, multiprocessing_context="spawn")
            total = sum(batch.sum() for batch in loader)
            assert comm.Allreduce(total, mpicoll.MPI_SUM).item() == 28 * comm.size
    """,
        ranks=2,
        PYTHONPATH=str(tmp_path),
        limit=90,
    ).check()


@pytest.mark.parametrize("used", ["mpicoll", "mpi4py"])
def test_forked_child(used):
    """A clear error in the child, also where only mpi4py had used MPI; the parent goes on."""
    first = "comm.Barrier()" if used == "mpicoll" else "from mpi4py import MPI"
    python(
        f"""
        import os, torch, mpicoll
        comm = mpicoll.COMM_WORLD
        {first}
        child = os.fork()
        if child == 0:
            code = 1
            try:
                comm.Allreduce(torch.ones(1), mpicoll.MPI_SUM)
            except RuntimeError as error:
                code = 0 if "forked" in str(error) and "spawn" in str(error) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        assert comm.Allreduce(torch.ones(1), mpicoll.MPI_SUM).item() == comm.size
    """,
        ranks=2,
    ).check()


def test_without_a_launcher():
    python(
        USE
        + """
assert (mpicoll.COMM_WORLD.rank, mpicoll.COMM_WORLD.size) == (0, 1)
x = torch.ones(2, requires_grad=True)
mpicoll.COMM_WORLD.Allgather(x, 0).sum().backward()
assert x.grad.tolist() == [1.0, 1.0]
"""
    ).check()


def test_launcher_of_another_mpi():
    """The launcher says 2 ranks, the library 1: a warning that names both."""
    done = python("""
        import os, torch, warnings
        from mpi4py import MPI
        os.environ["PMI_SIZE"] = "2"
        import mpicoll
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mpicoll.COMM_WORLD.size
            mpicoll.COMM_WORLD.Allreduce(torch.ones(1), mpicoll.MPI_SUM)
        told = [w for w in caught if issubclass(w.category, RuntimeWarning)]
        assert len(told) == 1, caught
        print(told[0].message)
    """).check()
    assert "PMI_SIZE=2" in done.out
    assert "only one" in done.out


@pytest.mark.parametrize("errors", ["abort", "default", "fatal"])
def test_errors_raise_whatever_mpi4py_is_told(errors):
    """Our communicators return errors; Intel MPI gives a request's to the world's handler."""
    done = python(
        f"""
        import mpi4py
        mpi4py.rc.errors = {errors!r}
        import torch, mpicoll
        from mpi4py import MPI
        print(MPI.Get_library_version(), flush=True)
        for comm in (mpicoll.COMM_WORLD, mpicoll.COMM_WORLD.Dup(), mpicoll.COMM_WORLD.Split(0),
                     mpicoll.comm_from_mpi4py(MPI.COMM_WORLD.Dup())):
            other = 1 - comm.rank
            handle = comm.Isend(torch.ones(3), other, 0)
            try:
                comm.Recv(torch.empty(1), other, 0)
            except mpicoll.MPIError as error:
                assert error.error_class == MPI.ERR_TRUNCATE, error
                assert "12 bytes" in str(error), error
            else:
                raise SystemExit("no error")
            handle.wait()
            if comm is not mpicoll.COMM_WORLD:
                comm.Free()
    """,
        ranks=2,
    )
    if "Intel" in done.out:
        assert done.code != 0
        assert "Message truncated" in done.err
    else:
        done.check()


def test_settings_that_mean_nothing():
    from mpicoll import config  # imports no MPI

    for name, value, words in (
        ("MPICOLL_CUDA_AWARE", "yes", "must be 0 or 1"),
        ("MPICOLL_CHUNK_BYTES", "lots", "whole number of bytes"),
        ("MPICOLL_CHUNK_BYTES", "10", "at least 1024"),
        ("MPICOLL_ABORT_ON_ERROR", "no", "must be 0 or 1"),
        ("MPICOLL_POOL_BYTES", "-1", "whole number of bytes"),
        ("MPICOLL_SHARED_BYTES", "many", "whole number of bytes"),
    ):
        with pytest.raises(ValueError, match=f"{name} is '{value}'; .*{words}"):
            config.read({name: value})
    done = python(USE, MPICOLL_CHUNK_BYTES="10")
    assert done.code == 1
    assert "ValueError: MPICOLL_CHUNK_BYTES is '10'; " in done.err
    python(USE, ranks=2, MPICOLL_CHUNK_BYTES="1024").check()
