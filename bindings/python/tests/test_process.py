"""Leaks, threads, forks, pickles, Ctrl-C: what Python programs do to a library."""

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pytest
from ranks import assert_no_leak, sotto_run, thread_ranks

import sotto

f32 = np.float32


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def cycle(n, comm):
    x = np.zeros(4096, f32)
    for _ in range(n):
        with comm.codec("onebit", x) as codec:
            comm.all_reduce(x, codec=codec).wait()
        comm.split(0).close()
        params = [sotto.optim.Param(x, np.zeros_like(x))]
        with sotto.optim.Optimizer(params, kind="OneBitAdam", comm=comm, lr=0.1) as optimizer:
            optimizer.step().wait()
            optimizer.import_state(optimizer.export_state("exact"), "exact")


def test_1000_cycles_leave_nothing_behind(comm):
    cycle(300, comm)
    assert_no_leak(lambda: cycle(1000, comm), allowed_kb=1024)


def test_comms_and_contexts_leave_nothing_behind():
    def some(n):
        for _ in range(n):
            with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
                comm.all_reduce(np.zeros(100, f32)).wait()
            sotto.UniqueId(cpu_threads=1).close()

    gc.collect()  # what other tests have left
    some(100)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert_no_leak(lambda: some(1000), allowed_kb=2048)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


def test_arrays_live_as_long_as_their_operation():
    def body(comm):
        if comm.rank == 1:
            comm.recv(np.zeros(1, np.int8), 0).wait()
            comm.send(np.ones(1000, f32), 0).wait()
            return
        x = np.zeros(1000, f32)
        seen = weakref.ref(x)
        work = comm.recv(x, 1)
        del x
        gc.collect()
        assert seen() is not None
        del work  # no thread waits any more: the library still writes
        gc.collect()
        assert seen() is not None
        comm.send(np.zeros(1, np.int8), 1).wait()
        deadline = time.monotonic() + 50
        while seen() is not None and time.monotonic() < deadline:
            comm.send(np.zeros(0, np.int8), 1).wait()  # every call looks after what was left alone
        assert seen() is None

    thread_ranks(2, body)


def test_arrays_are_let_go_of_when_the_operation_has_ended(comm):
    x = np.zeros(1000, f32)
    seen = weakref.ref(x)
    work = comm.all_reduce(x)
    work.wait()
    del x
    gc.collect()
    assert seen() is None
    work.wait()


def test_a_comm_that_is_forgotten_is_told_and_given_back():
    gc.collect()  # what other tests have left
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        comm = sotto.create_comm(world_size=1, cpu_threads=1)
        comm.all_reduce(np.zeros(10)).wait()
        del comm
        gc.collect()
    assert [str(w.message) for w in caught] == ["<sotto.Comm rank 0 of 1> was not closed"]


def test_waiting_leaves_the_interpreter_to_other_threads():
    waits = threading.Event()

    def body(comm):
        if comm.rank == 1:
            assert waits.wait(50)
            # wait() comes back to Python every 0.1 s, too rarely for as many turns in its time.
            for _ in range(1000):
                time.sleep(0.001)
            comm.send(np.zeros(1, f32), 0).wait()
            return
        work = comm.recv(np.zeros(1, f32), 1)
        waits.set()
        work.wait()  # for what another thread does meanwhile

    thread_ranks(2, body)


def test_one_comm_from_several_threads(comm):
    errors = []

    def body():
        try:
            for _ in range(200):
                x = np.ones(50, f32)
                comm.all_reduce(x).wait()
                comm.counters()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert comm.counters().ops_completed == 800


def objects_of(comm):
    x = np.zeros(8, f32)
    yield comm
    yield comm.all_reduce(x)
    with comm.codec("onebit", x) as codec:
        yield codec
    with sotto.optim.Optimizer([(x, x.copy())], kind="Adam", comm=comm) as optimizer:
        yield optimizer
    with sotto.UniqueId(cpu_threads=1) as unique_id:
        yield unique_id


def test_nothing_can_be_pickled_or_copied(comm):
    for thing in objects_of(comm):
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied"):
                way(thing)


def in_child(body):
    """What body() returned, or the error it raised, in a forked child."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(body())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text


def test_a_forked_child_is_told(comm):
    x = np.zeros(8, f32)
    work = comm.all_reduce(x)
    work.wait()
    other = comm.all_reduce(x)
    for body in (
        lambda: comm.barrier(),
        lambda: comm.close(),
        lambda: comm.split(0),
        lambda: other.wait(),
    ):
        text = in_child(body)
        assert text.startswith("InvalidStateError: this "), text
        assert str(os.getpid()) in text
    assert "forked" in in_child(lambda: sotto.create_comm(world_size=1))
    other.wait()
    comm.barrier().wait()  # the parent's works on


def test_a_child_that_forgets_handles_does_no_harm(comm):
    boxes = [comm.codec("onebit", np.zeros(8, f32))]

    def forget():
        boxes.clear()
        gc.collect()
        return "ended"

    assert in_child(forget) == "ended"
    boxes[0].close()


def test_spawned_processes_start_anew():
    code = (
        "import multiprocessing as mp, sotto\n"
        "def child(q):\n"
        "    with sotto.create_comm(world_size=1) as comm: q.put(comm.size)\n"
        "if __name__ == '__main__':\n"
        "    with sotto.create_comm(world_size=1):\n"
        "        q = mp.get_context('spawn').Queue()\n"
        "        p = mp.get_context('spawn').Process(target=child, args=(q,)); p.start()\n"
        "        print('size', q.get(timeout=100)); p.join()\n"
    )
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        run = subprocess.run(
            [sys.executable, file.name], capture_output=True, text=True, timeout=130, check=False
        )
    assert run.stdout == "size 1\n", run.stderr


INTERRUPTED = """
import signal
import numpy as np, sotto
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
unique_id = sotto.UniqueId()
def meet():
    print('waiting', flush=True)
    return sotto.create_comm(rank=0, world_size=2, unique_id=unique_id, timeout=600)
def receive():
    import threading
    box = []
    thread = threading.Thread(target=lambda: box.append(
        sotto.create_comm(rank=1, world_size=2, unique_id=bytes(unique_id), timeout=60)))
    thread.start()
    comm = sotto.create_comm(rank=0, world_size=2, unique_id=unique_id, timeout=60)
    thread.join()
    work = comm.recv(np.zeros(1), 1)
    try:
        print('waiting', flush=True)
        work.wait()
    finally:
        box[0].send(np.ones(1), 0).wait()
        work.wait()  # it went on
        print('completed', flush=True)
try:
    {what}()
except KeyboardInterrupt:
    print('interrupted', flush=True)
"""


@pytest.mark.parametrize(
    ("what", "said"), [("meet", "interrupted\n"), ("receive", "completed\ninterrupted\n")]
)
def test_ctrl_c_ends_a_wait(what, said):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED.format(what=what)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert out == said, err
    assert process.returncode == 0, err


LEFT_BEHIND = """
import io, signal, threading
import numpy as np, sotto
from sotto.optim import Optimizer
signal.signal(signal.SIGINT, signal.default_int_handler)
unique_id, others = sotto.UniqueId(), []
def rank(number, kind, **hyper):
    mine = unique_id if number == 0 else bytes(unique_id)
    comm = sotto.create_comm(rank=number, world_size=2, unique_id=mine, timeout=60)
    x = np.ones(100, np.float32)
    optimizer = Optimizer([(x, x.copy())], kind=kind, lr=0.1, comm=comm, **hyper)
    for _ in range(6):
        optimizer.step().wait()
    return optimizer
def left(call, *arguments, **hyper):
    thread = threading.Thread(target=lambda: others.append(rank(1, *arguments, **hyper)))
    thread.start()
    optimizer = rank(0, *arguments, **hyper)
    thread.join()
    print("waiting", flush=True)
    try:
        call(optimizer)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    call(others[0])
    for thread in threading.enumerate():
        if thread.name == "sotto-call":  # it goes on until the other rank has come
            thread.join()
def write():
    files, written = [io.BytesIO(), io.BytesIO()], []
    def call(optimizer):
        try:
            optimizer.write_state(files[optimizer._comm.rank], "mean")
        finally:
            written.append(files[0].tell())
    left(call, "OneBitAdam", freeze_step=1)
    print(written[0] == files[0].tell() < files[1].tell())
def freeze():
    hyper = {{"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 8}}
    left(lambda o: o.set_frozen([True]), "ZeroOneAdam", **hyper)
{what}()
"""


@pytest.mark.parametrize(("what", "said"), [("write", "True\n"), ("freeze", "")])
def test_ctrl_c_ends_a_collective_of_an_optimizer(what, said):
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", LEFT_BEHIND.format(what=what)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert out == "interrupted\n" + said, err
    assert process.returncode == 0, err


LEFT = """
import sys
import numpy as np, sotto
comm = sotto.init_process_group(timeout=60)
kept = comm.all_reduce(np.zeros(int(sys.argv[1]), np.float32))
comm.all_reduce(np.zeros(int(sys.argv[1]), np.float32))  # the Work is dropped at once
"""


def test_a_process_may_end_with_operations_in_flight():
    # Which rank finds the others gone is a matter of time; none may crash.
    for n in (10, 3_000_000, 3_000_000, 3_000_000):
        run = subprocess.run(
            [
                *(sotto_run(), "-n", "3", "--grace", "60", "--"),
                *(sys.executable, "-W", "ignore", "-c", LEFT, str(n)),
            ],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert "signal" not in run.stderr, run.stderr


EARLY = """
import sys, time
import numpy as np, sotto
comm = sotto.init_process_group(timeout=60)
x = np.full(1000, comm.rank, np.float32)
if sys.argv[1] == "optimizer":
    kept = sotto.optim.Optimizer([(np.zeros_like(x), np.zeros_like(x))], kind="Adam", lr=1)
elif sys.argv[1] == "codec":
    kept = comm.codec("int8", x)
elif sys.argv[1] == "split":
    kept = comm.split(0)
comm.barrier().wait()
if comm.rank != 0:
    time.sleep(0.5)
comm.broadcast(x).wait()
assert (x == 0).all()
"""


@pytest.mark.parametrize("left", ["comm", "optimizer", "codec", "split"])
def test_a_process_may_end_before_others_have_read_what_it_sent(left):
    run = subprocess.run(
        [sotto_run(), "-n", "2", "--", sys.executable, "-W", "ignore", "-c", EARLY, left],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


LOST = """
import os, sys
import numpy as np, sotto
comm = sotto.init_process_group(timeout=60)
comm.barrier().wait()
if comm.rank == 1:
    os._exit(3)
try:
    comm.all_reduce(np.zeros(10)).wait()
except sotto.PeerLostError as error:
    print("lost", isinstance(error, ConnectionError), "rank 1" in str(error), flush=True)
try:
    comm.barrier()
except sotto.PeerLostError:
    print("still lost", type(comm.error()).__name__, flush=True)
comm.close()
"""


def test_a_rank_that_dies_is_told():
    run = subprocess.run(
        [sotto_run(), "-n", "2", "--grace", "100", "--", sys.executable, "-c", LOST],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert "lost True True" in run.stdout, run.stdout + run.stderr
    assert "still lost PeerLostError" in run.stdout
    assert "rank 1 failed first, with exit code 3" in run.stderr
