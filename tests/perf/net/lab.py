"""Where ranks live: in hosts of integration/netns/lab.sh, or beside each other on loopback."""

import os
import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[3] / "integration/netns/lab.sh"
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


def permitted():
    """("root" or "userns", "") if hosts can be made here, else ("", reason)."""
    check = subprocess.run([SCRIPT, "check"], capture_output=True, text=True, check=False)
    text = check.stdout.strip()
    return (text, "") if check.returncode == 0 else ("", text or "no reason given")


class Lab:
    """Hosts 1 .. ranks, one per rank, with links of one rate."""

    interface = "eth0"

    def __init__(self, ranks, rate, programs, delay=None, loss=None):
        """programs: the folder of sotto-perf, which may also have what lab.sh needs."""
        self.name = f"sotto-net-{os.getpid()}"
        self.environment = {**os.environ, "NETLAB": self.name}
        tunlink = Path(programs, "sotto-tunlink")
        if tunlink.exists():
            self.environment.setdefault("NETLAB_TUNLINK", str(tunlink))
        self.bits_per_second = bits_per_second(rate)
        self._remove_stale()
        words = ["up", str(ranks), rate]
        if delay:
            words += ["--delay", delay]
        if loss:
            words += ["--loss", f"{loss:g}"]
        self._run(*words)
        self.description = self._run("describe")

    def _run(self, *words, name=None):
        environment = {**self.environment, **({"NETLAB": name} if name else {})}
        run = subprocess.run([SCRIPT, *words], env=environment, capture_output=True, text=True, check=False)
        if run.returncode != 0:
            raise LabError(f"lab.sh {' '.join(words)}: {run.stderr.strip() or run.stdout.strip()}")
        return run.stdout.strip()

    def _remove_stale(self):
        """Labs whose benchmark was killed before it could tidy up."""
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        listing = subprocess.run(["ip", "netns", "list"], env={**os.environ, "PATH": path}, capture_output=True,
                                 text=True, check=False).stdout
        for name, pid in re.findall(r"^(sotto-net-([0-9]+))-bridge", listing, re.MULTILINE):
            if not Path("/proc", pid).exists():
                self._run("down", name=name)

    def inside(self, rank):
        """Words to put before a command that is to run as this rank."""
        return [str(SCRIPT), "exec", str(rank + 1)]

    def address(self, rank):
        return self._run("address", str(rank + 1))

    def sent_bytes(self, pid):
        """By the interface of the host that this process is in."""
        for line in Path(f"/proc/{pid}/net/dev").read_text(encoding="ascii").splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == self.interface:
                return int(counters.split()[8])
        raise LabError(f"process {pid} has no interface {self.interface}")

    def close(self):
        self._run("down")


class Loopback:
    """Ranks on 127.0.0.1, held to the rate by the TCP transport's own limiter."""

    interface = "lo"

    def __init__(self, rate):
        self.environment = dict(os.environ)
        self.bits_per_second = bits = bits_per_second(rate)
        limit = "none" if bits is None else f"{bits / 1e6:g} Mbit/s"
        if bits is not None:
            self.environment["SOTTO_RATE_LIMIT_MBIT"] = f"{bits / 1e6:g}"
        self.description = f"loopback; limit of the TCP transport: {limit}; kernel {os.uname().release}"

    def inside(self, rank):  # pylint: disable=unused-argument
        return []

    def address(self, rank):  # pylint: disable=unused-argument
        return "127.0.0.1"

    def sent_bytes(self, pid):  # pylint: disable=unused-argument
        return None  # others use the interface too

    def close(self):
        pass
