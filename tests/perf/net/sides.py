"""The sides that are compared: our ranks and those of other libraries, all alive, told one side at a time what to do.

Every rank connects to the Unix socket of its side and writes {"rank": R, "pid": P}, ours also version and build, gloo's
whether there is numpy. Then it does commands, one a line, together with the other ranks of its side, and writes an object for
each (or {"error": "text"}, and ends):

  size N             memory for N float32: a hash of element and rank, the same on all sides, as multiples of 2^-15 in [-1, 1)
  check METHOD       one all-reduce. {"checksum": hash of the result, "error_max": largest difference from the mean over
                     ranks, "error_rms": root of the mean square difference, relative to the mean's}
  series METHOD D C  D all-reduces, a barrier, C all-reduces. {"ns": time of the C, and of ours counters}
  singles METHOD C   C times a barrier and an all-reduce. {"ns": [time of each all-reduce], and of ours counters}
  singles METHOD C US  ours alone: the same, with a pause of US microseconds before each barrier, in which the rank sleeps
  urgent US          ours alone: a barrier, a dense all-reduce of the N float32, and US microseconds after it has begun one of 4 bytes.
                     {"ns": time of the small one, "bulk_ns": of the large one}

Between commands a rank blocks in read, so that sides that are not told anything use no processor.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import formulas

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
METHODS = ("fp32", "bf16", "int8", "int4", "1bit")
START_S = 120
OPEN_MPI_ANYWHERE = ("--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1")
OPEN_MPI = (*OPEN_MPI_ANYWHERE, "--mca", "pml", "ob1", "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0")
RING = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_allreduce_algorithm", "4")


class SideError(Exception):
    """A side did not do what it was told; the text says why."""


class Missing(Exception):
    """A peer cannot run here; the text says why."""


class Side:
    """Ranks of one library. commands: one (words, environment) per process to start."""

    methods = ("fp32",)

    def payload(self, method, n, rank):
        """The formula: bytes that a rank sends in one all-reduce of n float32."""
        return formulas.payload(method, n, self.ranks, rank)

    def on_interface(self, method, n, rank):
        """Of these, and of those of other ranks of its host, what leaves by the host's interface."""
        return self.payload(method, n, rank)

    def __init__(self, name, ranks, commands):
        self.name = name
        self.ranks = ranks
        self.pids = [0] * ranks
        self.about = {}  # what rank 0 says of itself
        self._connections = {}  # rank -> (socket, its lines)
        self._processes = []
        self._folder = tempfile.TemporaryDirectory(prefix="sotto-net-")
        self._log = Path(self._folder.name, "log")
        self._control = str(Path(self._folder.name, "control"))
        self._commands = commands

    def start(self):
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(self._control)
                listener.listen(self.ranks)
                with open(self._log, "wb") as log:
                    for words, environment in self._commands:
                        words = [self._control if word == "CONTROL" else word for word in words]
                        self._processes.append(subprocess.Popen(
                            words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                            start_new_session=True))
                self._greet(listener)
        except BaseException:
            self.stop()
            raise

    def _greet(self, listener):
        listener.settimeout(0.2)
        deadline = time.monotonic() + START_S
        while len(self._connections) < self.ranks:
            try:
                connection = listener.accept()[0]
            except TimeoutError:
                if time.monotonic() > deadline:
                    self._fail(f"only {len(self._connections)} of {self.ranks} ranks were there after {START_S} s")
                if any(process.poll() for process in self._processes):
                    self._fail("ended with an error")
                continue
            connection.settimeout(max(1, deadline - time.monotonic()))
            lines = connection.makefile("r", encoding="utf-8")
            hello = self._read(lines)
            self.pids[hello["rank"]] = hello["pid"]
            self._connections[hello["rank"]] = connection, lines
            if hello["rank"] == 0:
                self.about = hello

    def _fail(self, text):
        log = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise SideError(f"{self.name}: {text}" + "".join(f"\n    {line}" for line in log[-12:]))

    def _read(self, lines):
        try:
            line = lines.readline()
        except OSError as error:
            self._fail(f"no answer: {error}")
        if not line:
            self._fail("a rank has ended")
        reply = json.loads(line)
        if "error" in reply:
            self._fail(reply["error"])
        return reply

    def tell(self, command, limit_s=300.0):
        """What every rank answers, in rank order."""
        for connection, _ in self._connections.values():
            connection.settimeout(limit_s)
            try:
                connection.sendall(command.encode() + b"\n")
            except OSError as error:
                self._fail(f"a rank is gone: {error}")
        return [self._read(self._connections[rank][1]) for rank in range(self.ranks)]

    def stop(self):
        for connection, lines in self._connections.values():
            lines.close()
            connection.close()
        self._connections = {}
        deadline = time.monotonic() + 5
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes = []
        self._folder.cleanup()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Ours(Side):
    methods = METHODS

    def __init__(self, lab, ranks, sotto_perf, name="sotto", apart=False, **environment):
        """apart: every rank counts as a host of its own, whatever the lab says."""
        rendezvous = f"tcp://{lab.address(0)}:{free_port()}"
        self._per_host = lab.per_host
        self._levels = environment.get("SOTTO_HIERARCHY") == "sharded"
        super().__init__(name, ranks, [
            ([*lab.inside(r), sotto_perf, "net_rank", "CONTROL"],
             {**lab.environment, **environment, "SOTTO_RANK": str(r), "SOTTO_WORLD_SIZE": str(ranks), "SOTTO_RENDEZVOUS": rendezvous,
              "SOTTO_LISTEN": lab.address(r), **({"SOTTO_HOST_ID": f"rank {r}"} if apart else lab.host_id(r))}) for r in range(ranks)])

    def payload(self, method, n, rank):
        if not self._levels:
            return super().payload(method, n, rank)
        return formulas.sharded(method, n, self.ranks // self._per_host, self._per_host, rank)

    def on_interface(self, method, n, rank):
        if self._per_host == 1:
            return self.payload(method, n, rank)
        formula = formulas.between_hosts if self._levels else formulas.flat_between_hosts
        first = rank // self._per_host * self._per_host
        return sum(formula(method, n, self.ranks // self._per_host, self._per_host, r) for r in range(first, first + self._per_host))


OVER_UCX = "sotto ucx"  # ours over UCX's sockets, next to "sotto", which has its own


def over_ucx(lab, ranks, sotto_perf):
    return Ours(lab, ranks, sotto_perf, name=OVER_UCX, apart=True, SOTTO_TRANSPORT="ucx", UCX_TLS="tcp")


def python_with_torch():
    """Raises Missing where there is none."""
    probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    for python in (str(ROOT / ".venv/bin/python"), sys.executable, "python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", probe], check=False).returncode == 0:
                return python
    raise Missing("torch is not installed")


def _gloo(lab, ranks, _build):
    python = python_with_torch()
    port = str(free_port())
    return [([*lab.inside(r), python, "-B", str(HERE / "peer_gloo.py"), "CONTROL"],
             {**lab.environment, "RANK": str(r), "WORLD_SIZE": str(ranks), "MASTER_ADDR": lab.address(0),
              "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": lab.interface, "OMP_NUM_THREADS": "1"}) for r in range(ranks)]


def _compiled(library, build):
    """The program of an MPI library, compiled again if the source has changed."""
    compiler = shutil.which(f"mpicc.{library}")
    if not compiler or not shutil.which(f"mpiexec.{library}"):
        raise Missing(f"mpicc.{library} and mpiexec.{library} are not installed")
    source, program = HERE / "peer_mpi.c", Path(build, f"peer_{library}")
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        Path(build).mkdir(parents=True, exist_ok=True)
        run = subprocess.run([compiler, "-std=gnu99", "-O2", str(source), "-o", str(program), "-lm"], capture_output=True,
                             text=True, check=False)
        if run.returncode != 0:
            raise Missing(f"{compiler}: {run.stderr.strip().splitlines()[0]}")
    return str(program)


def _mpi(lab, ranks, library, options):
    """mpiexec in the first host, under the name that the list of hosts gives it."""
    hosts = [f"host{h + 1}" for h in range(ranks // lab.per_host)]
    words = [str(HERE / "enter.sh"), hosts[0], *map(shlex.quote, [f"mpiexec.{library}", *options(hosts)]), "CONTROL"]
    return [(words, {**lab.environment, "OMP_NUM_THREADS": "1", "SOTTO_LAB": str(ROOT / "integration/netns/lab.sh")})]


def _mpi_on_one_host(lab, words):
    """With what the library has for it: its shared memory."""
    return [([*words, "CONTROL"], {**lab.environment, "OMP_NUM_THREADS": "1"})]


def _openmpi(*more):
    def commands(lab, ranks, build):
        program = _compiled("openmpi", build)
        if not lab.has_hosts:
            return _mpi_on_one_host(lab, ["mpiexec.openmpi", *OPEN_MPI_ANYWHERE, *more, "-n", str(ranks), program])
        return _mpi(lab, ranks, "openmpi", lambda hosts: [
            *OPEN_MPI, *more, "--mca", "btl", "tcp,self" + (",vader" if lab.per_host > 1 else ""),
            "--mca", "plm_rsh_agent", str(HERE / "enter.sh"), "-H", ",".join(f"{host}:{lab.per_host}" for host in hosts),
            "-n", str(ranks), program])
    return commands


def _mpich(lab, ranks, build):
    program = _compiled("mpich", build)
    if not lab.has_hosts:
        return _mpi_on_one_host(lab, ["mpiexec.mpich", "-n", str(ranks), program])
    addresses = [lab.address(r) for r in range(0, ranks, lab.per_host)]
    return _mpi(lab, ranks, "mpich", lambda _: [
        "-launcher", "rsh", "-launcher-exec", str(HERE / "enter.sh"), "-iface", lab.interface, "-hosts", ",".join(addresses), "-ppn", str(lab.per_host),
        "-genv", "UCX_TLS", "tcp", "-genv", "UCX_NET_DEVICES", lab.interface, "-n", str(ranks), program])


PEERS = {"gloo": _gloo, "openmpi": _openmpi(), "openmpi-ring": _openmpi(*RING), "mpich": _mpich}
SHARDED = "sotto sharded"  # ours in two levels, next to "sotto", which has one
OVER_TCP = "sotto tcp"  # ours on one host, next to "sotto", which has shared memory there
EAGER = ("gloo", "1bit")  # operations of a framework on top of gloo's collectives: for row 15 alone


def start_peer(name, lab, ranks, build):
    """Raises Missing where it cannot run."""
    try:
        peer = Side(name, ranks, PEERS[name](lab, ranks, build))
        peer.start()
        return peer
    except SideError as error:
        raise Missing(f"it does not start: {error}") from error
