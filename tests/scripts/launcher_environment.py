"""The environment in which tests start the examples of integration/launchers."""

import os
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# By the program that is looked for: how it starts more ranks than there are cores, as root too.
MPI = {"mpiexec.openmpi": ["mpiexec.openmpi", "--allow-run-as-root", "--oversubscribe"], "mpiexec.hydra": ["mpiexec.hydra"]}
TORCHRUN = ROOT / ".venv/bin/torchrun"


def without_launchers():
    """The environment without what launchers have set."""
    foreign = ("SOTTO_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "RAY_", "PYTHON")
    return {k: v for k, v in os.environ.items()
            if not k.startswith(foreign) and k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


def environment(library, **more):
    """Without what other launchers have set, with the Python package of the checkout. library: path of libsotto.so."""
    return {**without_launchers(), "SOTTO_LIBRARY": library, "PYTHONPATH": str(ROOT / "bindings/python/src"), "PYTHONDONTWRITEBYTECODE": "1",
            "SOTTO_CPU_THREADS": "1", "SOTTO_TIMEOUT_US": "60000000", **more}


def free_job():
    """The number of a Slurm job whose port is free. Tests that run at a time begin at different ones."""
    for i in range(625):
        job = (os.getpid() + i) % 625
        with socket.socket() as port:
            try:
                port.bind(("0.0.0.0", 20000 + 16 * job))
            except OSError:
                continue
            return str(job)
    raise AssertionError("no port of a Slurm job is free")


def free_port():
    """A port P such that P + 1 is free too."""
    while True:
        with socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", 0))
            try:
                b.bind(("127.0.0.1", a.getsockname()[1] + 1))
            except OSError:
                continue
            return a.getsockname()[1]
