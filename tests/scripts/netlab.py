"""What the tests of integration/netns/lab.sh share: labs that end with their test, and programs that talk inside them."""

import contextlib
import os
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "integration/netns"))

import lab as labs  # noqa: E402
from lab import enter  # noqa: E402, F401  # for those who start tests

LAB = labs.SCRIPT
NAME = f"sotto-labtest-{os.getpid()}"

# Answers every datagram with itself, over both families.
ECHO = """
import selectors, socket
selector = selectors.DefaultSelector()
for family in (socket.AF_INET, socket.AF_INET6):
    server = socket.socket(family, socket.SOCK_DGRAM)
    if family == socket.AF_INET6: server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    server.bind(("", 7000)); server.setblocking(False)
    selector.register(server, selectors.EVENT_READ)
print("ready", flush=True)
while True:
    for key, _ in selector.select():
        try:
            data, peer = key.fileobj.recvfrom(2000)
            key.fileobj.sendto(data, peer)
        except OSError: pass
"""
# Seconds of the shortest of COUNT round trips to ADDRESS; "none" if there was no answer in TRIES of half a second.
PING = """
import socket, sys, time
address, count, tries = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
peer = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
peer.settimeout(0.5)
trips, number = [], 0
while len(trips) < count and tries > 0:
    number += 1
    start = time.monotonic()
    try:
        peer.sendto(str(number).encode(), (address, 7000))
        while int(peer.recv(2000)) != number: pass
        trips.append(time.monotonic() - start)
    except OSError:
        tries -= 1
        time.sleep(max(0, start + 0.5 - time.monotonic()))
print(min(trips) if len(trips) == count else "none")
"""


def lab(*words, **environment):
    return labs.script(*words, **{"NETLAB": NAME, **environment})


def namespaces(name=NAME):
    return labs.namespaces(f"{name}-")


def processes(namespace):
    listing = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in listing.split()]


def alive(pid):
    """A process that exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class LabCase(unittest.TestCase):
    """A lab ends with its test; where none can be made the test is skipped."""

    def setUp(self):
        check = lab("check")
        if check.stdout.strip() != "root":
            self.skipTest(f"no network namespaces: {check.stdout.strip()}")

    def up(self, *words, name=NAME):
        self.addCleanup(lab, "down", NETLAB=name)
        self.do("up", *words, name=name)

    def do(self, *words, name=NAME):
        run = lab(*words, NETLAB=name)
        if "/dev/net/tun" in run.stderr:
            self.skipTest(f"no delay and loss: {run.stderr.strip()}")
        self.assertEqual(run.returncode, 0, run.stderr)
        return run.stdout

    def start_python(self, host, code, *words, name=NAME):
        process = subprocess.Popen([str(LAB), "exec", str(host), sys.executable, "-c", code, *words],
                                   env={**os.environ, "NETLAB": name}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   text=True)
        self.addCleanup(self.end, process)
        return process

    @staticmethod
    def end(process):
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()

    def start_echo(self, *hosts, name=NAME):
        for host in hosts:
            self.assertEqual(self.start_python(host, ECHO, name=name).stdout.readline(), "ready\n")

    def round_trip(self, host, address, count=1, tries=20, name=NAME):
        """Seconds of the shortest of `count` round trips; None: no answer."""
        run = subprocess.run([str(LAB), "exec", str(host), sys.executable, "-c", PING, address, str(count), str(tries)],
                             env={**os.environ, "NETLAB": name}, capture_output=True, text=True, timeout=100, check=True)
        return None if run.stdout.strip() == "none" else float(run.stdout)

    def assert_reaches(self, host, address, name=NAME):
        self.assertIsNotNone(self.round_trip(host, address, name=name), f"host {host} does not reach {address}")

    def assert_cut(self, host, address, name=NAME):
        self.assertIsNone(self.round_trip(host, address, tries=2, name=name), f"host {host} reaches {address}")
