"""What the tests of sotto-run share: starting it, waiting, and files in which ranks say how far they are."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time

BIND = """
import os, socket
place = ("127.0.0.1", int(os.environ["SOTTO_RENDEZVOUS"].rpartition(":")[2]))
with socket.socket() as other:
    try:
        other.bind(place)
        print("free")
    except OSError:
        print("taken")
with socket.create_server(place):
    print("listens")
"""
_program = None
LIMIT_S = 100  # of what takes no time; ranks that would hold a run up sleep for longer


def take_program():
    """The first argument of a test is the path of sotto-run; the rest are unittest's.

    What the test starts ignores no signal that sotto-run takes, even where the test was started so.
    """
    global _program
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    _program = os.path.abspath(sys.argv.pop(1))
    assert re.search("sotto-run$", _program)


def program():
    return _program


def run(*args, **kwargs):
    kwargs = {"timeout": LIMIT_S, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **kwargs}
    return subprocess.run([program(), *args], text=True, **kwargs)


def sh(ranks, script, *options, **kwargs):
    return run("-n", str(ranks), *options, "--", "sh", "-c", script, **kwargs)


def alive(pid):
    """A process that exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as f:
            return f.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(condition):
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return False


class PidFiles:
    """Ranks write the numbers of their processes here, and wait for what others do."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.folder.cleanup()

    def pids(self):
        found = []
        for name in os.listdir(self.folder.name):
            if name.isdigit():
                found += self.pids_of(name)
        return found

    def pids_of(self, rank):
        """Of the rank's script and of its child."""
        with open(os.path.join(self.folder.name, str(rank)), encoding="ascii") as f:
            return [int(word) for word in f.read().split()]

    def script(self, rest):
        """Writes the numbers of the rank and of a child that would outlive it."""
        file = f"{self.folder.name}/$SOTTO_RANK"
        return f"sleep 1000 & echo $$ $! > {file}.tmp; mv {file}.tmp {file}; {rest}"

    def note(self, what):
        """A command by which a rank says that it has come so far."""
        return f": > {self.folder.name}/{what}.$SOTTO_RANK.tmp"

    def noted(self, what, rank):
        return os.path.exists(f"{self.folder.name}/{what}.{rank}.tmp")

    def wait_for(self, what, rank):
        """A command that ends when that rank has said so."""
        return f"while [ ! -e {self.folder.name}/{what}.{rank}.tmp ]; do sleep 0.02; done"

    def wait_for_the_end_of(self, rank):
        """A command that ends when sotto-run has seen that rank end: until then its number exists."""
        file = f"{self.folder.name}/{rank}"
        return f"while [ ! -s {file} ] || kill -0 $(cut -d' ' -f1 {file}) 2>/dev/null; do sleep 0.02; done"
