"""Delay, loss and partitions of integration/netns/lab.sh, with netem where the kernel has it and with the TUN program."""

import os
import signal
import subprocess
import time
import unittest

import netlab
from netlab import LAB, NAME, LabCase, lab

DATAGRAMS = 2000
DELAY_S = 0.04

# The numbers of the datagrams that came before the word that the sender repeats at its end.
COUNT = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE: more than a user may
server.bind(("", 7001)); print("ready", flush=True)
seen = []
while (data := server.recv(2000)) != b"end": seen.append(int(data))
print(*seen)
"""
SCATTER = """
import socket, sys, time
peer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(int(sys.argv[2])):
    peer.sendto(str(i).encode().ljust(int(sys.argv[3])), (sys.argv[1], 7001))
    if i % 20 == 19: time.sleep(float(sys.argv[4]))
while True:
    time.sleep(1)  # a full queue is empty then
    peer.sendto(b"end", (sys.argv[1], 7001))
"""
# A connection whose client answers every line on its standard input with the seconds of a round trip.
STREAM_SERVER = """
import socket
server = socket.create_server(("", 7002)); print("ready", flush=True)
peer = server.accept()[0]
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := peer.recv(100): peer.sendall(data)
"""
STREAM_CLIENT = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7002), 30)
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in sys.stdin:
    start = time.monotonic(); peer.sendall(b"x"); peer.recv(1)
    print(time.monotonic() - start, flush=True)
"""


class Links(LabCase):
    """Whatever way the kernel permits; a lab that starts with neither delay nor loss."""

    OPTIONS = ()

    def make(self, hosts, rate="none", *options):
        self.up(str(hosts), rate, *options, *self.OPTIONS)

    def received(self, datagrams=DATAGRAMS, size=20, pause=0.002):
        receiver = self.start_python(1, COUNT)
        self.assertEqual(receiver.stdout.readline(), "ready\n")
        sender = self.start_python(2, SCATTER, "10.79.0.1", str(datagrams), str(size), str(pause))
        got = [int(i) for i in receiver.communicate(timeout=100)[0].split()]
        self.end(sender)
        return got

    def test_delay_is_what_a_round_trip_takes_longer(self):
        self.make(3)
        self.start_echo(1)
        self.assertLess(self.round_trip(2, "10.79.0.1", count=20), DELAY_S)
        self.do("delay", f"{DELAY_S * 1000:.0f}ms")
        for address in ("10.79.0.1", "fd00:79::1"):
            trip = self.round_trip(2, address, count=20)
            self.assertGreater(trip, 0.99 * DELAY_S)
            self.assertLess(trip, 2 * DELAY_S)
        self.do("delay", "0")
        self.assertLess(self.round_trip(3, "10.79.0.1", count=20), DELAY_S)

    def test_a_connection_outlives_changes_and_partitions(self):
        self.make(2)
        self.assertEqual(self.start_python(1, STREAM_SERVER).stdout.readline(), "ready\n")
        client = self.start_python(2, STREAM_CLIENT, "10.79.0.1")

        def trip():
            client.stdin.write("go\n")
            client.stdin.flush()
            return float(client.stdout.readline())

        trip()
        self.do("delay", f"{DELAY_S * 1000:.0f}ms")
        self.assertGreater(trip(), 0.99 * DELAY_S)
        self.do("partition", "2")
        client.stdin.write("go\n")
        client.stdin.flush()
        time.sleep(1)
        self.do("heal")
        self.assertGreater(float(client.stdout.readline()), 0.9)

    def test_loss_takes_its_share(self):
        self.make(2, "none", "--loss", "10")
        got = self.received()
        self.assertEqual(len(set(got)), len(got))
        lost = DATAGRAMS - len(got)
        self.assertGreater(lost, 0.05 * DATAGRAMS)  # 200 expected, deviation 13
        self.assertLess(lost, 0.15 * DATAGRAMS)
        self.do("loss", "0")
        self.assertEqual(len(self.received()), DATAGRAMS)
        self.do("loss", "100")
        self.start_echo(1)
        self.assert_cut(2, "10.79.0.1")

    def test_a_partition_cuts_and_heals(self):
        self.make(4)
        self.start_echo(1, 2, 3, 4)
        for address in ("10.79.0.{}", "fd00:79::{}"):
            self.do("partition", "1", "3")
            for host, other in ((1, 3), (3, 1), (2, 4), (4, 2)):
                self.assert_reaches(host, address.format(other))
            for host, other in ((1, 2), (4, 3)):
                self.assert_cut(host, address.format(other))
            self.do("partition", "4")  # takes the place of the other
            self.assert_reaches(2, address.format(3))
            self.assert_cut(2, address.format(4))
            self.do("heal")
            for host, other in ((2, 4), (4, 3), (1, 2)):
                self.assert_reaches(host, address.format(other))


class TunLinks(Links):
    """With TUN devices in any case."""

    OPTIONS = ("--seed", "7")

    def test_a_seed_fixes_what_is_lost(self):
        seen = {}
        for run, seed in (("first", "7"), ("again", "7"), ("other", "8")):
            self.up("2", "none", "--loss", "10", "--seed", seed)
            seen[run] = self.received()
            self.do("down")
        self.assertEqual(seen["first"], seen["again"])
        self.assertNotEqual(seen["first"], seen["other"])

    def test_a_full_queue_drops_what_comes_last(self):
        """2 MB at once into a link of 10 Mbit/s: a bucket and a queue of 0.4 MB, and what passes meanwhile."""
        self.make(2, "10mbit")
        count, size = 1400, 1400
        start = time.monotonic()
        got = self.received(count, size, 0)
        seconds = time.monotonic() - start
        self.assertEqual(got, sorted(got))
        self.assertLess(len(got), count)
        self.assertGreater(len(got) * size, 256 * 1024)
        self.assertLess(len(got) * size, 2 * 256 * 1024 + (10e6 / 8) * (0.1 + seconds))
        self.assertIn(f"{count - len(got)} dropped by full queues", self.do("describe"))

    def program(self):
        found = [pid for pid in netlab.processes(f"{NAME}-bridge")
                 if os.readlink(f"/proc/{pid}/exe").endswith("/sotto-tunlink")]
        self.assertEqual(len(found), 1)
        return found[0]

    def assert_ends(self, pid):
        end = time.monotonic() + 60
        while netlab.alive(pid):
            self.assertLess(time.monotonic(), end, "sotto-tunlink has not ended")
            time.sleep(0.05)

    def test_the_program_ends_with_its_lab(self):
        self.make(2)
        pid = self.program()
        self.do("down")
        self.assert_ends(pid)
        self.make(2)
        pid = self.program()
        os.kill(pid, signal.SIGTERM)
        self.assert_ends(pid)
        self.assertIn("sotto-tunlink has ended", lab("delay", "1ms").stderr)
        self.do("down")

    def test_the_program_ends_when_the_lab_has_vanished(self):
        self.make(2)
        pid = self.program()
        for namespace in netlab.namespaces():
            subprocess.run(["ip", "netns", "del", namespace], check=True)
        self.assert_ends(pid)

    def test_the_program_ends_with_the_owner(self):
        with subprocess.Popen(["sleep", "300"]) as owner:
            try:
                os.environ["NETLAB_OWNER"] = str(owner.pid)
                self.make(2)
                pid = self.program()
            finally:
                os.environ.pop("NETLAB_OWNER", None)
                owner.kill()
        self.assert_ends(pid)


class WithoutRoot(unittest.TestCase):
    def test_a_lab_in_a_user_namespace(self):
        if os.geteuid() != 0:
            self.skipTest("this is not root: the other tests show it")
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]
        environment = {**os.environ, "NETLAB": NAME, "SCRIPT": str(LAB)}
        check = subprocess.run([*nobody, str(LAB), "check"], env=environment, capture_output=True, text=True, check=False)
        if check.stdout.strip() != "userns":
            self.skipTest(f"not as nobody: {check.stdout.strip()}{check.stderr.strip()}")
        script = """
            "$SCRIPT" up 2 10mbit && "$SCRIPT" delay 2ms && "$SCRIPT" exec 1 ip -br addr show eth0 && "$SCRIPT" describe
            ip netns pids "$NETLAB-bridge"
        """
        run = subprocess.run([*nobody, str(LAB), "enter", "sh", "-c", script], env=environment, capture_output=True, text=True,
                             timeout=60, check=False)
        if "/dev/net/tun" in run.stderr:
            self.skipTest(f"no delay and loss: {run.stderr.strip()}")
        self.assertEqual(run.returncode, 0, run.stderr)
        lines = run.stdout.splitlines()
        self.assertIn("10.79.0.1/24", lines[0])
        self.assertIn("10mbit" if "sotto-tunlink" in lines[1] else "netem", lines[1])
        for pid in lines[2:]:  # what carried the packets has ended with the shell, which did not say down
            end = time.monotonic() + 60
            while netlab.alive(pid):
                self.assertLess(time.monotonic(), end, f"process {pid} is left")
                time.sleep(0.05)
        self.assertEqual(netlab.namespaces(), [])


if __name__ == "__main__":
    netlab.enter()
    unittest.main()
