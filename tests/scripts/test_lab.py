"""integration/netns/lab.sh: hosts that reach each other, no faster than the rate; clear errors; nothing left behind."""

import os
import subprocess
import sys
import unittest
from pathlib import Path

LAB = Path(__file__).resolve().parents[2] / "integration/netns/lab.sh"
NAME = f"sotto-labtest-{os.getpid()}"
BURST_BYTES = 256 * 1024
SEND_BYTES = 1_500_000
RATE_MBIT = 10

RECEIVE = """
import selectors, socket, sys, time
server = socket.create_server((sys.argv[1], 0)); server.settimeout(20)
print(server.getsockname()[1], flush=True)
start, got, peers = None, 0, [server.accept()[0] for _ in range(int(sys.argv[2]))]
selector = selectors.DefaultSelector()
for peer in peers: selector.register(peer, selectors.EVENT_READ)
start = time.monotonic()
while selector.get_map():
    for key, _ in selector.select(20):
        data = key.fileobj.recv(1 << 16)
        got += len(data)
        if not data: selector.unregister(key.fileobj)
print(got, time.monotonic() - start, flush=True)
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
peer.sendall(bytes(int(sys.argv[3])))
"""


def lab(*words, **environment):
    return subprocess.run([str(LAB), *words], env={**os.environ, "NETLAB": NAME, **environment}, capture_output=True,
                          text=True, timeout=60, check=False)


def start_python(host, code, *words):
    return subprocess.Popen([str(LAB), "exec", str(host), sys.executable, "-c", code, *words],
                            env={**os.environ, "NETLAB": NAME}, stdout=subprocess.PIPE, text=True)


class WithoutALab(unittest.TestCase):
    def test_check_gives_an_answer(self):
        run = lab("check")
        self.assertIn(run.returncode, (0, 1))
        self.assertTrue(run.stdout.strip())
        if run.returncode == 0:
            self.assertIn(run.stdout.strip(), ("root", "userns"))

    def test_bad_arguments(self):
        for words, message in ((("up", "0", "none"), "'0'"), (("up", "x", "none"), "'x'"), (("up", "2", "fast"), "'fast'"),
                               (("up", "2", "0mbit"), "above 0"), (("wrap", "true"), "SOTTO_RANK"),
                               (("bogus",), "unknown command")):
            run = lab(*words, SOTTO_RANK="")
            self.assertNotEqual(run.returncode, 0, words)
            self.assertIn(message, run.stderr)


class Lab(unittest.TestCase):
    def setUp(self):
        check = lab("check")
        if check.stdout.strip() != "root":
            self.skipTest(f"no network namespaces: {check.stdout.strip()}")
        self.addCleanup(lab, "down")
        up = lab("up", "3", f"{RATE_MBIT}mbit")
        self.assertEqual(up.returncode, 0, up.stderr)

    def transfer(self, senders, size=SEND_BYTES):
        """Seconds for all senders together to send `size` bytes each to host 1."""
        receiver = start_python(1, RECEIVE, "10.79.0.1", str(len(senders)))
        port = receiver.stdout.readline().strip()
        started = [start_python(host, SEND, "10.79.0.1", port, str(size)) for host in senders]
        out = receiver.communicate(timeout=60)[0].split()
        for sender in started:
            sender.communicate(timeout=60)
        self.assertEqual(int(out[0]), size * len(senders))
        return float(out[1])

    def least_seconds(self, total_bytes):
        """Two buckets in a row let a burst through at once; the rest takes its time. 10 % for clocks and buffers."""
        return 0.9 * (total_bytes - 2 * BURST_BYTES) * 8 / (RATE_MBIT * 1e6)

    def test_a_link_is_no_faster_than_its_rate(self):
        self.assertGreater(self.transfer([2]), self.least_seconds(SEND_BYTES))

    def test_two_senders_share_the_receivers_link(self):
        self.assertGreater(self.transfer([2, 3]), self.least_seconds(2 * SEND_BYTES))

    def test_the_rate_can_be_lifted(self):
        self.assertEqual(lab("rate", "none").returncode, 0)
        self.assertNotIn("tbf", lab("describe").stdout)
        size = 5 * SEND_BYTES  # several seconds at the old rate, so that a busy machine does not look like it
        self.assertLess(self.transfer([2], size), self.least_seconds(size))

    def test_describe(self):
        text = lab("describe").stdout
        self.assertIn("tbf rate 10Mbit", text)
        self.assertIn("reno", text)

    def test_wrap_enters_the_host_of_the_rank(self):
        run = lab("wrap", "sh", "-c", "echo $SOTTO_LISTEN; ip -br addr show eth0", SOTTO_RANK="2")
        self.assertEqual(run.stdout.splitlines()[0], "10.79.0.3")
        self.assertIn("10.79.0.3/24", run.stdout)

    def test_a_second_lab_of_the_same_name_is_refused(self):
        self.assertIn("is up already", lab("up", "1", "none").stderr)

    def test_a_host_that_does_not_exist(self):
        self.assertIn("no host 9", lab("exec", "9", "true").stderr)

    def test_down_ends_processes_and_hosts(self):
        process = start_python(1, "import time; print('on', flush=True); time.sleep(300)")
        process.stdout.readline()
        self.assertEqual(lab("down").returncode, 0)
        self.assertNotEqual(process.wait(20), 0)
        process.stdout.close()
        listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        self.assertNotIn(NAME, listing)


if __name__ == "__main__":
    unittest.main()
