"""Comms of torch's process groups: adopted, of sub-groups, over several machines."""

import contextlib
import datetime
import os
import subprocess
import sys
import time

import pytest
from ranks import ROOT, run_ranks, thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

import torch.distributed as dist  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

torch.set_num_threads(1)
LAB = str(ROOT / "integration/netns/lab.sh")


def join(seconds=120):
    """torch's process group of all ranks; nothing is left that could tell sotto of them."""
    rank, size = int(os.environ.pop("SOTTO_RANK")), int(os.environ.pop("SOTTO_WORLD_SIZE"))
    dist.init_process_group(
        "gloo",
        init_method=os.environ.pop("SOTTO_RENDEZVOUS"),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=seconds),
    )
    os.environ.pop("SOTTO_LISTEN", None)  # of the lab's hosts
    assert sotto.launch.detect(os.environ) is None
    return rank, size


def both_sum(comm, group=None):
    """sotto's sum and torch's, of the same ranks, one after the other."""
    ours, theirs = (
        torch.full((5,), float(dist.get_rank())),
        torch.full((5,), float(dist.get_rank())),
    )
    comm.all_reduce(ours).wait()
    dist.all_reduce(theirs, group=group)
    assert torch.equal(ours, theirs)
    return ours[0].item()


def rank_adopts():
    rank, size = join()

    def refused(*_, **__):
        raise AssertionError("a collective of torch carried the id")

    kept, dist.all_gather_object = dist.all_gather_object, refused
    store = dist.distributed_c10d._get_default_store()
    keys = store.num_keys()
    for _ in range(3):
        with sotto.init_process_group() as comm:
            assert (comm.rank, comm.size) == (rank, size)
            assert sotto.default_comm() is comm
            assert both_sum(comm) == size * (size - 1) / 2
        dist.barrier()
    assert store.num_keys() - keys < 8  # of torch's barriers, if any
    dist.all_gather_object = kept
    with sotto.init_process_group(world_size=1) as alone:  # explicit arguments win
        assert alone.size == 1
    dist.destroy_process_group()
    print("adopted")


@pytest.mark.parametrize("size", [2, 4])
def test_init_process_group_adopts_torchs(size):
    assert run_ranks(size, __file__, "rank_adopts").count("adopted") == size


def rank_makes_an_optimizer():
    """The first that needs a comm makes it, from torch's group."""
    rank, size = join()
    torch.manual_seed(rank)
    net = torch.nn.Linear(30, 10)
    st.broadcast_parameters(net)
    comm = sotto.default_comm()
    optimizer = st.OnebitAdam(net.parameters(), lr=0.01, freeze_step=2)
    assert optimizer._comm is comm
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(4, 30)).square().mean().backward()
        optimizer.step()
    st.check_parameters(net)
    assert comm.counters().payload_bytes_sent > 0
    both_sum(comm)
    optimizer.close()
    comm.close()
    dist.destroy_process_group()
    print("stepped", comm.size == size)


def test_optimizers_adopt_torchs_group():
    assert run_ranks(2, __file__, "rank_makes_an_optimizer").count("stepped True") == 2


def rank_takes_the_launchers():
    """Without torch's group an optimizer takes the ranks that the launcher started."""
    net = torch.nn.Linear(3, 3)
    optimizer = st.AdamW(net.parameters())
    comm = sotto.default_comm()
    assert comm.size == int(os.environ["SOTTO_WORLD_SIZE"])
    optimizer.close()
    comm.close()
    print("launched")


def test_optimizers_take_the_launchers_ranks():
    assert run_ranks(2, __file__, "rank_takes_the_launchers").count("launched") == 2


TAKEN = """
import errno, os, socket, torch, sotto, sotto.torch
taken = socket.socket()
if os.environ["RANK"] == "0":
    try:
        taken.bind(("", int(os.environ["MASTER_PORT"]) + 1))
        taken.listen()
    except OSError as error:  # another process has it
        assert error.errno == errno.EADDRINUSE, error
for _ in range(2):
    with sotto.init_process_group(timeout=60) as comm:
        x = torch.full((3,), comm.rank + 1.0)
        comm.all_reduce(x).wait()
        assert x.tolist() == [3.0] * 3
        print("met")
"""


def test_torchruns_ranks_need_no_port_beside_its_own(tmp_path):
    """MASTER_PORT + 1 may be in use, as the end of a connection that is closed for instance."""
    program = tmp_path / "taken.py"
    program.write_text(TAKEN)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SOTTO_RE")}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    run = subprocess.run(
        [sys.executable, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert run.stdout.count("met") == 4


def rank_splits():
    rank, _ = join()
    halves = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine, other = halves[rank % 2], halves[1 - rank % 2]
    with st.comm_of_process_group(mine) as comm, st.comm_of_process_group() as world:
        assert (comm.rank, comm.size) == (dist.get_rank(mine), 2)
        assert both_sum(comm, mine) == (2 if rank % 2 == 0 else 4)
        assert both_sum(world) == 6
        with pytest.raises(sotto.InvalidArgumentError, match=f"rank {rank} of the world is not in"):
            st.comm_of_process_group(other)
    dist.destroy_process_group()
    print("split")


def test_sub_groups():
    assert run_ranks(4, __file__, "rank_splits").count("split") == 4


def rank_is_late():
    """Who waits says for whom; who comes too late hears of it; the next meeting is a new one."""
    rank, _ = join()
    # So many seconds that neither of the other two is too late.
    group = dist.new_group([2, 0, 1], timeout=datetime.timedelta(seconds=20))
    dist.barrier()
    if rank != 1:
        begin = time.monotonic()
        with pytest.raises(
            sotto.OperationTimeoutError,
            match=r"waited 20 s .* of 3 ranks; not there: rank 1\. Every rank",
        ) as told:
            st.comm_of_process_group(group)
        assert time.monotonic() - begin >= 20 or "gave up" in str(told.value)
    dist.barrier()
    if rank == 1:
        with pytest.raises(sotto.OperationTimeoutError, match=r"rank (0|2) gave up: waited"):
            st.comm_of_process_group(group)
    dist.barrier()
    with st.comm_of_process_group(group, timeout=60) as comm:
        both_sum(comm, group)
    if rank != 0:  # ranks of the world, where they are others
        pair = dist.new_group([1, 2], use_local_synchronization=True)
        if rank == 1:
            with pytest.raises(
                sotto.OperationTimeoutError,
                match=r"not there: rank 1 \(rank 2 of the world\)",
            ):
                st.comm_of_process_group(pair, timeout=0.5)
    dist.barrier()
    dist.destroy_process_group()
    print("told")


def test_ranks_that_do_not_come_are_named():
    assert run_ranks(3, __file__, "rank_is_late").count("told") == 3


def rank_of_two_machines():
    join()
    with sotto.init_process_group(timeout=60) as comm:
        print("sum", both_sum(comm))
    dist.destroy_process_group()


@contextlib.contextmanager
def two_hosts(monkeypatch):
    monkeypatch.setenv("NETLAB", f"sotto-torch-{os.getpid()}")
    subprocess.run([LAB, "up", "2", "none"], check=True, capture_output=True)
    try:
        yield subprocess.run(
            [LAB, "address", "1"], check=True, capture_output=True, text=True
        ).stdout.strip()
    finally:
        subprocess.run([LAB, "down"], check=True, capture_output=True)


def test_ranks_on_two_machines_find_each_other(monkeypatch):
    check = subprocess.run([LAB, "check"], capture_output=True, text=True, check=False)
    if check.stdout.strip() != "root":
        pytest.skip(f"no network namespaces here: {check.stdout.strip()}")
    with two_hosts(monkeypatch) as address:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
        out = run_ranks(
            2,
            __file__,
            "rank_of_two_machines",
            options=("--rendezvous", f"tcp://{address}:29517", "--wrapper", f"{LAB} wrap"),
        )
    assert out.count("sum 1.0") == 2


def test_dtypes_that_differ_between_ranks_are_told_on_all():
    def body(comm):
        net = torch.nn.Linear(20, 5).to(torch.bfloat16 if comm.rank else torch.float32)
        optimizer = st.OnebitLamb(net.parameters(), comm=comm)
        net(torch.ones(3, 20, dtype=net.weight.dtype)).sum().backward()
        with pytest.raises(sotto.ProtocolError) as caught:
            optimizer.step()
        return str(caught.value)

    texts = thread_ranks(2, body)
    assert all("rank" in text for text in texts), texts
