"""integration/netns/lab.sh: hosts that reach each other, no faster than the rate; clear errors; nothing left behind."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import netlab
from netlab import LAB, NAME, LabCase, lab

BURST_BYTES = 256 * 1024
SEND_BYTES = 1_500_000
RATE_MBIT = 10

RECEIVE = """
import selectors, socket, sys, time
server = socket.create_server((sys.argv[1], 0)); server.settimeout(60)
print(server.getsockname()[1], flush=True)
got, peers = 0, [server.accept()[0] for _ in range(int(sys.argv[2]))]
selector = selectors.DefaultSelector()
for peer in peers: selector.register(peer, selectors.EVENT_READ)
start = time.monotonic()
for peer in peers: peer.sendall(b"x")  # none sends before
while selector.get_map():
    for key, _ in selector.select(60):
        data = key.fileobj.recv(1 << 16)
        got += len(data)
        if not data: selector.unregister(key.fileobj)
print(got, time.monotonic() - start, flush=True)
"""
SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], int(sys.argv[2])), 60)
peer.recv(1)
peer.sendall(bytes(int(sys.argv[3])))
"""


class WithoutALab(unittest.TestCase):
    def test_check_gives_an_answer(self):
        run = lab("check")
        self.assertIn(run.returncode, (0, 1))
        self.assertTrue(run.stdout.strip())
        if run.returncode == 0:
            self.assertIn(run.stdout.strip(), ("root", "userns"))

    def test_bad_arguments(self):
        for words, message in (
                (("up", "0", "none"), "'0': expected 1 to 250"), (("up", "251", "none"), "'251'"), (("up", "x", "none"), "'x'"),
                (("up", "2", "fast"), "'fast'"), (("up", "2", "0mbit"), "above 0"), (("up", "2", "101gbit"), "at most 100gbit"),
                (("up", "2", "none", "--delay", "5"), "'5': expected 0 or a whole number with us, ms or s"),
                (("up", "2", "none", "--delay", "11s"), "'11s': at most 10s"),
                (("up", "2", "none", "--loss", "101"), "'101': expected percent from 0 to 100"),
                (("up", "2", "none", "--loss", "-1"), "'-1'"), (("up", "2", "none", "--loss"), "--loss needs a value"),
                (("up", "2", "none", "--interfaces", "3"), "'3': expected 1 or 2"),
                (("up", "2", "none", "--seed", "x"), "'x': expected a whole number"),
                (("up", "2", "none", "--mtu", "1279"), "'1279': expected 1280 to 65535"),
                (("up", "2", "none", "--mtu", "65536"), "'65536'"), (("up", "2", "none", "--mtu", "9k"), "'9k'"),
                (("up", "2", "none", "--colour", "red"), "unknown option '--colour'"),
                (("rate", "1mbit"), "is not up"), (("delay", "1ms"), "is not up"), (("loss", "1"), "is not up"),
                (("partition", "1"), "is not up"), (("heal",), "is not up"), (("describe",), "is not up"),
                (("address", "0"), "'0': expected 1 to 250"), (("address", "1", "--interface", "eth2"), "'eth2'"),
                (("address", "1", "--fast"), "unknown option '--fast'"),
                (("wrap", "true"), "SOTTO_RANK"), (("bogus",), "unknown command")):
            run = lab(*words, SOTTO_RANK="")
            self.assertNotEqual(run.returncode, 0, words)
            self.assertIn(message, run.stderr)
        self.assertIn("NETLAB 'a.b'", lab("describe", NETLAB="a.b").stderr)
        for command in ("up", "rate", "delay", "loss", "partition", "exec"):
            self.assertEqual(lab(command).returncode, 2, command)

    def test_addresses(self):
        for words, address in ((("3",), "10.79.0.3"), (("12", "--ipv6"), "fd00:79::12"),
                               (("3", "--interface", "eth1"), "10.80.0.3"),
                               (("3", "--interface", "eth1", "--ipv6"), "fd00:80::3")):
            self.assertEqual(lab("address", *words).stdout.strip(), address)


class Rates(LabCase):
    OPTIONS = ()
    DESCRIBED = "tbf rate 10Mbit"

    def setUp(self):
        super().setUp()
        self.up("3", f"{RATE_MBIT}mbit", *self.OPTIONS)

    def transfer(self, senders, size=SEND_BYTES):
        """Seconds for all senders together to send `size` bytes each to host 1."""
        receiver = self.start_python(1, RECEIVE, "10.79.0.1", str(len(senders)))
        port = receiver.stdout.readline().strip()
        started = [self.start_python(host, SEND, "10.79.0.1", port, str(size)) for host in senders]
        out = receiver.communicate(timeout=100)[0].split()
        for sender in started:
            sender.communicate(timeout=100)
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
        text = self.do("describe")
        self.assertIn(self.DESCRIBED, text)
        self.assertIn("reno", text)
        self.do("rate", "none")
        self.assertNotIn(self.DESCRIBED, self.do("describe"))
        size = 20 * SEND_BYTES  # many seconds at the old rate, so that a busy machine does not look like it
        self.assertLess(self.transfer([2], size), self.least_seconds(size))


class TunRates(Rates):
    """With TUN devices."""

    OPTIONS = ("--seed", "1")
    DESCRIBED = "sotto-tunlink rate 10mbit"


class Lab(LabCase):
    def setUp(self):
        super().setUp()
        self.up("3", "10mbit")

    def test_wrap_enters_the_host_of_the_rank(self):
        run = lab("wrap", "sh", "-c", "echo $SOTTO_LISTEN; ip -br addr show eth0", SOTTO_RANK="2")
        self.assertEqual(run.stdout.splitlines()[0], "10.79.0.3")
        self.assertIn("10.79.0.3/24", run.stdout)

    def test_a_second_lab_of_the_same_name_is_refused(self):
        self.assertIn("is up already", lab("up", "1", "none").stderr)

    def test_a_host_that_does_not_exist(self):
        self.assertIn("no host 9", lab("exec", "9", "true").stderr)
        self.assertIn("no host '9'", lab("partition", "1", "9").stderr)

    def test_a_bad_value_changes_nothing(self):
        before = self.do("describe")
        for words in (("rate", "quick"), ("delay", "soon"), ("loss", "some")):
            run = lab(*words)
            self.assertNotEqual(run.returncode, 0)
            self.assertIn(f"'{words[1]}'", run.stderr)
        self.assertEqual(self.do("describe"), before)

    def test_a_second_lab_beside_the_first(self):
        second = f"{NAME}-b"
        self.up("2", "none", name=second)
        self.start_echo(1)
        self.start_echo(1, name=second)
        self.do("partition", "1")
        self.assert_reaches(2, "10.79.0.1", name=second)
        self.assert_cut(2, "10.79.0.1")
        self.do("heal")
        self.do("down", name=second)
        self.assert_reaches(2, "10.79.0.1")

    def test_down_ends_processes_and_hosts(self):
        process = self.start_python(1, "import time; print('on', flush=True); time.sleep(300)")
        process.stdout.readline()
        self.do("down")
        self.assertNotEqual(process.wait(60), 0)
        self.assertEqual(netlab.namespaces(), [])


class TwoInterfaces(LabCase):
    def test_both_reach_the_other_hosts_and_are_cut_together(self):
        self.up("3", "100mbit", "--interfaces", "2")
        self.start_echo(1)
        addresses = [self.do("address", "1", "--interface", name).strip() for name in ("eth0", "eth1")]
        for address in (*addresses, "fd00:80::1"):
            self.assert_reaches(2, address)
        self.do("partition", "3", "2")
        for address in addresses:
            self.assert_cut(2, address)
        self.do("heal")
        for address in addresses:
            self.assert_reaches(2, address)

    def test_not_with_tun_devices(self):
        run = lab("up", "2", "none", "--interfaces", "2", "--seed", "1")
        self.assertIn("--interfaces 2: not with TUN devices", run.stderr)
        self.assertEqual(netlab.namespaces(), [])


class LargePackets(LabCase):
    def test_all_interfaces_have_the_mtu(self):
        self.up("2", "100mbit", "--mtu", "9000")
        for host in ("1", "2"):
            self.assertIn(" mtu 9000 ", self.do("exec", host, "ip", "link", "show", "eth0"))
        self.start_echo(1)
        self.assert_reaches(2, self.do("address", "1").strip())
        # In one piece, with 28 bytes of headers: the bridge lets it through, too.
        receiver = self.start_python(1, "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 7777)); "
                                     "print('ready', flush=True); s.settimeout(60); print(len(s.recv(65536)), flush=True)")
        self.assertEqual(receiver.stdout.readline(), "ready\n")
        self.do("exec", "2", sys.executable, "-c", "import socket; s = socket.socket(type=socket.SOCK_DGRAM); "
                "s.setsockopt(socket.IPPROTO_IP, 10, 2); "  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
                "s.sendto(bytes(9000 - 28), ('10.79.0.1', 7777))")
        self.assertEqual(receiver.stdout.readline(), f"{9000 - 28}\n")

    def test_not_with_tun_devices(self):
        run = lab("up", "2", "none", "--mtu", "9000", "--seed", "1")
        self.assertIn("--mtu 9000: not with TUN devices", run.stderr)
        self.assertEqual(netlab.namespaces(), [])


class WithoutTheProgram(LabCase):
    def test_it_is_said_how_to_build_it(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "integration/netns/lab.sh"
            copy.parent.mkdir(parents=True)
            shutil.copy(LAB, copy)
            environment = {**os.environ, "NETLAB": NAME}
            environment.pop("NETLAB_TUNLINK", None)
            run = subprocess.run([str(copy), "up", "2", "none", "--seed", "1"], env=environment, capture_output=True, text=True,
                                 timeout=60, check=False)
        self.assertEqual(run.returncode, 1)
        self.assertIn("--target sotto-tunlink", run.stderr)
        self.assertEqual(netlab.namespaces(), [])

    def test_a_wrong_path_is_named(self):
        run = lab("up", "2", "none", "--seed", "1", NETLAB_TUNLINK="/nowhere/sotto-tunlink")
        self.assertIn("NETLAB_TUNLINK: '/nowhere/sotto-tunlink'", run.stderr)


if __name__ == "__main__":
    netlab.enter()
    unittest.main()
