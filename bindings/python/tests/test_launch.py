"""Launchers' environments, and what is said when there is none."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import sotto
from sotto.launch import LAUNCHERS, detect, rendezvous


@pytest.mark.parametrize(("name", "rank", "size"), LAUNCHERS)
def test_launchers_are_recognised(name, rank, size):
    assert detect({rank: "1", size: "4"}) == (name, 1, 4)
    assert detect({rank: "1"}) is None


def test_launchers_are_those_of_the_library_in_its_order():
    source = Path(__file__).resolve().parents[3] / "core/group/launcher.cc"
    table = re.search(r"kLaunchers\[\] = \{\n(.*?)\n\};", source.read_text(), re.DOTALL)
    assert table is not None
    pairs = re.findall(r'\{Launcher::\w+, "(\w+)", "(\w+)"\},', table.group(1))
    assert len(pairs) == len(table.group(1).splitlines())
    assert pairs == [(rank, size) for _, rank, size in LAUNCHERS]


def test_the_first_launcher_counts():
    env = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "RANK": "0", "WORLD_SIZE": "2"}
    assert detect(env).launcher == "torchrun"


def test_mpich_in_a_job_of_open_mpi():
    """Its connection tells that the others' variables are inherited."""
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    env |= {"PMI_RANK": "1", "PMI_SIZE": "2"}
    ends = socket.socketpair()
    for end in ends:
        with end:
            assert detect(env | {"PMI_FD": str(end.fileno())}) == ("MPICH (PMI)", 1, 2)
    for number in ("987654", "x", "", "-1", "0"):
        assert detect(env | {"PMI_FD": number}).launcher == "Open MPI"
    del env["PMI_SIZE"]
    assert detect(env).launcher == "Open MPI"


@pytest.mark.parametrize(
    ("rank", "size"), [("x", "2"), ("2", "2"), ("0", "0"), ("-1", "2"), ("", "2")]
)
def test_wrong_numbers_are_named(rank, size):
    with pytest.raises(
        sotto.InvalidArgumentError, match=r"environment variable (RANK|WORLD_SIZE) is"
    ):
        detect({"RANK": rank, "WORLD_SIZE": size})


def test_the_place_to_meet():
    assert (
        rendezvous({"SOTTO_RENDEZVOUS": "tcp://a:1", "MASTER_ADDR": "b", "MASTER_PORT": "2"})
        == "tcp://a:1"
    )
    assert rendezvous({"MASTER_ADDR": "b", "MASTER_PORT": "2"}) == "tcp://b:3"
    assert rendezvous({"MASTER_ADDR": "::1", "MASTER_PORT": "2"}) == "tcp://[::1]:3"
    assert rendezvous({"MASTER_ADDR": "b"}) is None


def clean(**extra):
    names = {n for _, *pair in LAUNCHERS for n in pair} | {
        "SOTTO_RENDEZVOUS",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    return {**{k: v for k, v in os.environ.items() if k not in names}, **extra}


def start(code, **extra):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=clean(**extra),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_without_a_launcher_everything_that_was_looked_for_is_listed():
    text, _ = start("import sotto; sotto.init_process_group()").communicate(timeout=100)
    for _, *names in LAUNCHERS:
        for name in names:
            assert name in text
    assert "InvalidArgumentError: no launcher was found" in text


def test_without_a_place_to_meet_it_says_so():
    text, _ = start(
        "import sotto; sotto.init_process_group()", RANK="0", WORLD_SIZE="2"
    ).communicate(timeout=100)
    assert "2 ranks (RANK=0, WORLD_SIZE=2), but no rendezvous is known" in text
    assert "MASTER_ADDR" in text
    text, _ = start("import sotto; sotto.init_process_group(rank=0, world_size=2)").communicate(
        timeout=100
    )
    assert "it is not known where the ranks meet" in text
    assert "MASTER_ADDR" in text


def test_the_library_looks_for_the_place_of_its_launchers():
    for variables, missing in (
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "neither PMI_FD nor PMI_PORT"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "not SLURM_STEP_NODELIST"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "not PMIX_NAMESPACE"),
    ):
        for arguments in ("", "'env://'"):
            text, _ = start(
                f"import sotto; sotto.init_process_group({arguments})", **variables
            ).communicate(timeout=100)
            assert missing in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world_size": 2, "rank": 2, "init_method": "tcp://127.0.0.1:1"}, "rank is 2 of 2"),
        ({"world_size": 2, "init_method": "tcp://127.0.0.1:1"}, "rank is not given"),
        ({"world_size": 1, "init_method": "file:///x"}, "init_method is 'file:///x'"),
        ({"world_size": 1, "unique_id": b"short"}, "unique_id has 5 bytes"),
        ({"world_size": 1, "unique_id": bytes(128), "init_method": "env://"}, "more than one of"),
        ({"world_size": 1, "timeout": -1}, "timeout is -1"),
    ],
)
def test_wrong_arguments(monkeypatch, arguments, text):
    for _, *names in LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    with pytest.raises(sotto.InvalidArgumentError, match=text):
        sotto.create_comm(**arguments)


SUM = """
import numpy as np, sotto
comm = sotto.init_process_group({arguments})
x = np.array([comm.rank + 1.0])
comm.all_reduce(x).wait()
print(comm.rank, comm.size, x[0], sotto.default_comm() is comm)
comm.close()
"""


@pytest.fixture
def free_port():
    """A port of 127.0.0.1 for rank 0: bound here, so that no other process is given it, but not
    listened at, so that a listener with SO_REUSEADDR can have it. It is the one after
    MASTER_PORT."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


@pytest.mark.parametrize(("rank", "size"), [pair[1:] for pair in LAUNCHERS])
def test_two_processes_of_every_launcher(free_port, rank, size):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port - 1)}
    ranks = [
        start(SUM.format(arguments="timeout=60"), **{rank: str(r), size: "2"}, **place)
        for r in range(2)
    ]
    texts = [process.communicate(timeout=100)[0] for process in ranks]
    for r, text in enumerate(texts):
        assert f"{r} 2 3.0 True" in text


def test_explicit_arguments_win(free_port):
    wrong = {"RANK": "7", "WORLD_SIZE": "9", "SOTTO_RENDEZVOUS": "tcp://127.0.0.1:9"}
    ranks = [
        start(
            SUM.format(
                arguments=f"'tcp://127.0.0.1:{free_port}', rank={r}, world_size=2, timeout=60"
            ),
            **wrong,
        )
        for r in range(2)
    ]
    for r, process in enumerate(ranks):
        assert f"{r} 2 3.0 True" in process.communicate(timeout=100)[0]


# The barrier: neither ends before the other receives.
@pytest.mark.parametrize("left", ["", "work = comm.recv(x, 1 - comm.rank); comm.barrier().wait()"])
def test_a_process_that_forgets_to_close_ends(free_port, left):
    code = SUM.format(arguments="timeout=600").replace("comm.close()", left)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port - 1), "WORLD_SIZE": "2"}
    ranks = [start(code, RANK=str(r), **place) for r in range(2)]
    for r, process in enumerate(ranks):
        text = process.communicate(timeout=100)[0]
        assert f"{r} 2 3.0 True" in text
        assert process.returncode == 0, text


def test_a_group_of_one_needs_nothing():
    text, _ = start(SUM.format(arguments="world_size=1")).communicate(timeout=100)
    assert "0 1 1.0 True" in text


def test_a_group_of_one_beside_that_of_the_launcher():
    place = {"SOTTO_RENDEZVOUS": "tcp://127.0.0.1:9", "SOTTO_RANK": "1", "SOTTO_WORLD_SIZE": "2"}
    text, _ = start(SUM.format(arguments="world_size=1"), **place).communicate(timeout=100)
    assert "0 1 1.0 True" in text


def test_the_default_comm():
    code = (
        "import sotto\n"
        "try: sotto.default_comm()\n"
        "except sotto.InvalidStateError as e: print(e)\n"
        "comm = sotto.init_process_group(world_size=1)\n"
        "try: sotto.init_process_group(world_size=1)\n"
        "except sotto.InvalidStateError as e: print(e)\n"
        "comm.close(); comm.close()\n"
        "sotto.init_process_group(world_size=1).close(); print('again')\n"
    )
    text, _ = start(code).communicate(timeout=100)
    assert "there is no default comm" in text
    assert "there is a default comm already" in text
    assert text.endswith("again\n")
