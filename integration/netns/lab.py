"""Where ranks live: in hosts of lab.sh, or beside each other on loopback. For programs in Python that need a network."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent / "lab.sh"
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class LabError(Exception):
    """The text says what could not be done."""


def bits_per_second(rate):
    """None: unlimited. ValueError if it is no rate."""
    if rate == "none":
        return None
    match = re.fullmatch(r"([1-9][0-9]*)(kbit|mbit|gbit)", rate)
    if not match:
        raise ValueError(f"'{rate}' is no rate: allowed are none and numbers with kbit, mbit or gbit")
    return int(match[1]) * UNITS[match[2]]


def seconds(time):
    match = re.fullmatch(r"([0-9]+)(us|ms|s)", time)
    if not match:
        raise ValueError(f"'{time}' is no time: allowed are numbers with us, ms or s")
    return int(match[1]) * TIMES[match[2]]


def script(*words, **environment):
    """Runs lab.sh to its end, whatever that is."""
    return subprocess.run([str(SCRIPT), *words], env={**os.environ, **environment}, capture_output=True, text=True,
                          timeout=60, check=False)


def a_rate(text):
    """A rate as an option of argparse."""
    try:
        bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def permitted():
    """("root" or "userns", "") if hosts can be made here, else ("", reason)."""
    check = script("check")
    text = check.stdout.strip()
    return (text, "") if check.returncode == 0 else ("", text or "no reason given")


def enter(words=None):
    """What permitted() says. Where only a user namespace permits hosts, the program goes on inside one first: started again
    with these words behind the interpreter (None: as it was)."""
    how, reason = permitted()
    if how == "userns":
        command = sys.orig_argv if words is None else [sys.executable, *words]
        os.execv(SCRIPT, [str(SCRIPT), "enter", *command])
    return how, reason


def interface_bytes(process, interface):
    """Sent by an interface of the network namespace that a process is in; "self" is this one. Errors: LabError."""
    for line in Path(f"/proc/{process}/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise LabError(f"process {process} has no interface {interface}")


def namespaces(prefix):
    """Network namespaces whose names start so."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    listing = subprocess.run(["ip", "netns", "list"], env={**os.environ, "PATH": path}, capture_output=True, text=True,
                             check=False).stdout
    return [line.split()[0] for line in listing.splitlines() if line.startswith(prefix)]


class Lab:
    """Hosts 1, 2, .. with links of one rate; the first per_host ranks are in the first of them, and so on."""

    interface = "eth0"
    has_hosts = True

    def __init__(self, ranks, rate, programs, delay=None, loss=None, prefix="sotto-net", mtu=None, per_host=1):
        """programs: the folder of the build's programs, which may have what lab.sh needs. prefix: of the lab's name, which
        ends in the process; labs of processes that are gone are removed."""
        self.prefix, self.per_host = prefix, per_host
        self.name = f"{prefix}-{os.getpid()}"
        self.environment = {**os.environ, "NETLAB": self.name}
        tunlink = Path(programs, "sotto-tunlink")
        if tunlink.exists():
            self.environment.setdefault("NETLAB_TUNLINK", str(tunlink))
        self.bits_per_second = bits_per_second(rate)
        self._remove_stale()
        words = ["up", str(ranks // per_host), rate]
        if delay:
            words += ["--delay", delay]
        if loss:
            words += ["--loss", f"{loss:g}"]
        if mtu:
            words += ["--mtu", str(mtu)]
        self._run(*words)
        self.description = self._run("describe")

    def _run(self, *words, name=None):
        run = script(*words, **{**self.environment, **({"NETLAB": name} if name else {})})
        if run.returncode != 0:
            raise LabError(f"lab.sh {' '.join(words)}: {run.stderr.strip() or run.stdout.strip()}")
        return run.stdout.strip()

    def _remove_stale(self):
        """Labs whose program was killed before it could tidy up."""
        for namespace in namespaces(f"{self.prefix}-"):
            match = re.fullmatch(r"(.*-([0-9]+))-bridge", namespace)
            if match and not Path("/proc", match[2]).exists():
                self._run("down", name=match[1])

    def inside(self, rank):
        """Words to put before a command that is to run as this rank."""
        return [str(SCRIPT), "exec", str(self.host(rank))]

    def host(self, rank):
        return rank // self.per_host + 1

    def host_id(self, rank):
        """For Sotto's ranks, where several share a host: hosts of a lab have one name and one kernel."""
        return {"SOTTO_HOST_ID": f"host {self.host(rank)}"} if self.per_host > 1 else {}

    def address(self, rank):
        return self._run("address", str(self.host(rank)))

    def launch_words(self, port):
        """Options of sotto-run: every rank in a host of its own."""
        return ["--rendezvous", f"tcp://{self.address(0)}:{port}", "--wrapper", f"'{SCRIPT}' wrap"]

    def sent_bytes(self, pid):
        """By the interface of the host that this process is in."""
        return interface_bytes(pid, self.interface)

    def close(self):
        self._run("down")


class Loopback:
    """Ranks on 127.0.0.1, held to the rate by the TCP transport's own limiter."""

    interface = "lo"
    has_hosts = False
    per_host = 1

    def __init__(self, rate):
        self.environment = dict(os.environ)
        self.bits_per_second = bits = bits_per_second(rate)
        limit = "none" if bits is None else f"{bits / 1e6:g} Mbit/s"
        if bits is not None:
            self.environment["SOTTO_RATE_LIMIT_MBIT"] = f"{bits / 1e6:g}"
        self.description = f"loopback; limit of the TCP transport: {limit}; kernel {os.uname().release}"

    def inside(self, rank):  # pylint: disable=unused-argument
        return []

    def host_id(self, rank):  # pylint: disable=unused-argument
        return {}

    def address(self, rank):  # pylint: disable=unused-argument
        return "127.0.0.1"

    def launch_words(self, port):  # pylint: disable=unused-argument
        return []

    def sent_bytes(self, pid):  # pylint: disable=unused-argument
        return None  # others use the interface too

    def close(self):
        pass
