"""Four ranks in a network lab: the same results over a bad network as over loopback, and an end for all when it parts.

test_lab_ranks.py SOTTO_RUN CPP_TRAINER
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import netlab
from netlab import LAB, NAME, LabCase

RANKS = 4
APART = 3  # the rank that is cut off, in the host after that
TIMEOUT_S = 20
# What a rank may take beyond its time-out: telling the others, and processes that wait for a core.
SLACK_S = 40
OVER_UCX = {"SOTTO_TRANSPORT": "ucx", "UCX_TLS": "tcp"}
SOTTO_RUN = CPP_TRAINER = ""


def in_hosts(port, *options):
    return ["--rendezvous", f"tcp://10.79.0.1:{port}", "--wrapper", f"'{LAB}' wrap", *options]


class Ranks(LabCase):
    def command(self, *options):
        # Line by line, so that it can be seen how far the ranks are.
        return [SOTTO_RUN, "-n", str(RANKS), *options, "--", "stdbuf", "-oL", CPP_TRAINER]

    def environment(self, **more):
        return {**os.environ, "NETLAB": NAME, **more}

    def need_ucx(self):
        info = subprocess.run([Path(SOTTO_RUN).parent / "sotto", "info", "--json"], stdout=subprocess.PIPE, check=True).stdout
        if "ucx" not in json.loads(info)["build"]["transports"]:
            self.skipTest("this build has no UCX transport")

    def test_delay_and_loss_change_no_result(self):
        self.assert_same_over_a_bad_network()

    def test_delay_and_loss_change_no_result_over_ucx(self):
        self.need_ucx()
        self.assert_same_over_a_bad_network(**OVER_UCX)

    def assert_same_over_a_bad_network(self, **environment):
        plain = subprocess.run(self.command(), env=self.environment(), capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(plain.returncode, 0, plain.stderr)
        self.up(str(RANKS), "100mbit", "--delay", "50ms", "--loss", "1")
        start = time.monotonic()
        bad = subprocess.run(self.command(*in_hosts(29500)), env=self.environment(**environment), capture_output=True,
                             text=True, timeout=240, check=False)
        self.assertEqual(bad.returncode, 0, bad.stderr)
        self.assertIn("weights are equal", bad.stdout)
        self.assertEqual(bad.stdout, plain.stdout)  # losses and bytes, to the last digit
        self.assertGreater(time.monotonic() - start, 300 * 0.025)  # 300 steps, each with a message at least
        lost = re.search(r"(\d+) lost", self.do("describe"))
        if lost:  # netem does not tell
            self.assertGreater(int(lost.group(1)), 0)

    def run_where_the_rendezvous_is(self, address, port):
        """Ranks that are told no address to listen at: the results."""
        run = subprocess.run(
            self.command("--rendezvous", f"tcp://{address}:{port}", "--wrapper", f"'{LAB}' wrap env -u SOTTO_LISTEN"),
            env=self.environment(), capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("weights are equal", run.stdout)

    def sent(self, interface):
        """Bytes by an interface of every host."""
        lines = [self.do("exec", str(host + 1), "cat", "/proc/net/dev") for host in range(RANKS)]
        return [int(re.search(rf"^ *{interface}:(.*)$", text, re.M).group(1).split()[8]) for text in lines]

    def test_data_takes_the_interface_that_leads_to_the_rendezvous(self):
        self.up(str(RANKS), "100mbit", "--interfaces", "2")
        self.run_where_the_rendezvous_is("10.80.0.1", 29502)
        first, second = self.sent("eth0"), self.sent("eth1")
        self.assertGreater(min(second), 100_000)
        self.assertLess(max(first), 20_000)  # neighbours looking for each other

    def test_ipv6(self):
        if not Path("/proc/sys/net/ipv6").exists():
            self.skipTest("this kernel has no IPv6")
        self.up(str(RANKS), "100mbit")
        self.run_where_the_rendezvous_is("[fd00:79::1]", 29503)

    def partition_in_a_run(self, **more):
        """What the ranks printed, and seconds from the partition to the end. more: environment."""
        self.up(str(RANKS), "100mbit", "--delay", "20ms")
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            environment = self.environment(SOTTO_TIMEOUT_US=str(TIMEOUT_S * 1_000_000), SOTTO_HEARTBEAT_MS="500", **more)
            with out.open("w", encoding="utf-8") as file, subprocess.Popen(
                    self.command(*in_hosts(29501, "--grace", "100")), env=environment, stdout=file, stderr=file) as run:
                try:
                    end = time.monotonic() + 100
                    while "step  50" not in out.read_text(encoding="utf-8"):
                        self.assertLess(time.monotonic(), end, out.read_text(encoding="utf-8"))
                        self.assertIsNone(run.poll(), out.read_text(encoding="utf-8"))
                        time.sleep(0.02)
                    start = time.monotonic()
                    self.do("partition", str(APART + 1))
                    self.assertEqual(run.wait(150), 1)
                    return out.read_text(encoding="utf-8"), time.monotonic() - start
                finally:
                    run.kill()

    def test_a_partition_ends_every_rank_with_an_error(self):
        self.assert_every_rank_names_others(*self.partition_in_a_run())

    def test_a_partition_ends_every_rank_over_ucx(self):
        self.need_ucx()
        self.assert_every_rank_names_others(*self.partition_in_a_run(SOTTO_SILENCE_LIMIT_MS="4000", **OVER_UCX))

    def assert_every_rank_names_others(self, text, seconds):
        self.assertLess(seconds, TIMEOUT_S + SLACK_S, text)
        for rank in range(RANKS):
            said = re.findall(rf"^\[{rank}\] cpp-trainer: (.*)$", text, re.M)
            self.assertTrue(said, f"rank {rank}: {text}")
            others = "[0-2]" if rank == APART else str(APART)
            self.assertRegex(said[0], rf"rank {others}\b", text)


if __name__ == "__main__":
    netlab.enter()
    SOTTO_RUN, CPP_TRAINER = sys.argv[1:3]
    del sys.argv[1:3]
    unittest.main()
