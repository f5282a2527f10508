"""The library's log in Python's logging."""

import logging
import subprocess
import sys
import time

import numpy as np
import pytest
from ranks import sotto_run, thread_ranks

import sotto

WARNED = {"optimizer": {"type": "OneBitAdam", "params": {"eps_inside_sqrt": True}}}


def warn(comm):
    """An optimizer whose configuration is warned about."""
    params = [sotto.optim.Param(np.zeros(4, np.float32), np.zeros(4, np.float32))]
    sotto.optim.Optimizer(params, WARNED, comm=comm).close()


@pytest.fixture
def captured():
    yield
    sotto.capture_log(False)


@pytest.mark.usefixtures("captured")
def test_warnings_arrive(caplog, capfd):
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        sotto.capture_log()
        warn(comm)
        sotto.capture_log(False)
        (record,) = caplog.records
        assert (record.name, record.levelno) == ("sotto", logging.WARNING)
        assert "eps_inside_sqrt" in record.getMessage()
        assert capfd.readouterr().err == ""
        warn(comm)
    assert len(caplog.records) == 1
    assert "eps_inside_sqrt" in capfd.readouterr().err


@pytest.mark.usefixtures("captured")
def test_levels(caplog):
    caplog.set_level(1, "sotto")

    def body(comm):
        if comm.rank == 0:
            comm.abort("enough")
        with pytest.raises(sotto.AbortedError):
            comm.recv(np.zeros(1), 1 - comm.rank).wait()
        comm.close()

    for level, logged in (("warning", False), ("info", True)):
        sotto.capture_log(level=level)
        caplog.clear()
        thread_ranks(2, body)
        sotto.capture_log(False)  # all that came before has been handed on
        failures = [r for r in caplog.records if "the group has failed" in r.getMessage()]
        assert bool(failures) == logged
        assert {r.levelno for r in failures} <= {logging.INFO}
    with pytest.raises(sotto.InvalidArgumentError, match="level is 'loud'; allowed: None, error"):
        sotto.capture_log(level="loud")


@pytest.mark.usefixtures("captured")
def test_handlers_may_use_the_library():
    """They run outside of the call that logs."""
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        seen = []

        class Handler(logging.Handler):
            def emit(self, record):
                x = np.ones(3, np.float32)
                comm.all_reduce(x).wait()
                seen.append(record.getMessage())

        handler = Handler()
        logger = logging.getLogger("sotto")
        logger.addHandler(handler)
        try:
            sotto.capture_log()
            warn(comm)
            deadline = time.monotonic() + 60
            while not seen and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            sotto.capture_log(False)
            logger.removeHandler(handler)
    assert len(seen) == 1


# The log is captured until the interpreter ends, while a thread of the library logs
# how the group failed.
ENDS = """
import logging, sys
import numpy as np, sotto
logging.basicConfig(stream=sys.stdout, level=1, format="%(name)s %(levelname)s")
sotto.capture_log(level="trace")
comm = sotto.init_process_group(timeout=60)
work = comm.recv(np.zeros(1), 1 - comm.rank)
try:
    comm.barrier().wait()  # neither ends before the other receives
except sotto.AbortedError:
    pass  # the other rank has gone on already
if comm.rank == 0:
    comm.abort("the end")
"""


def test_the_interpreter_ends_while_the_library_logs():
    for _ in range(5):
        run = subprocess.run(
            [sotto_run(), "-n", "2", "--timeout", "100", "--", sys.executable, "-c", ENDS],
            capture_output=True,
            text=True,
            timeout=130,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert "Fatal" not in run.stderr
