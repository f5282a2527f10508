#!/usr/bin/python3
"""sotto-run with real processes: run_test.py PATH-OF-SOTTO-RUN"""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import tempfile
import termios
import time
import unittest
from pathlib import Path

from running import BIND, LIMIT_S, PidFiles, alive, program, run, sh, take_program, wait_until

SHOW = "echo r=$SOTTO_RANK/$SOTTO_WORLD_SIZE l=$SOTTO_LOCAL_RANK/$SOTTO_LOCAL_SIZE; echo err-$SOTTO_RANK >&2"


class Output(unittest.TestCase):
    def test_prefix_and_environment(self):
        done = sh(3, SHOW)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()), [f"[{r}] r={r}/3 l={r}/3" for r in range(3)])
        self.assertEqual(sorted(done.stderr.splitlines()), [f"[{r}] err-{r}" for r in range(3)])

    def test_rendezvous_is_one_free_loopback_port(self):
        done = sh(3, "echo $SOTTO_RENDEZVOUS")
        addresses = {line.split()[1] for line in done.stdout.splitlines()}
        self.assertEqual(len(addresses), 1)
        self.assertRegex(addresses.pop(), r"^tcp://127\.0\.0\.1:[0-9]+$")
        done = sh(1, "echo $SOTTO_RENDEZVOUS", "--rendezvous", "tcp://10.0.0.1:7000")
        self.assertEqual(done.stdout, "[0] tcp://10.0.0.1:7000\n")
        self.assertEqual(run("-n", "1", "--rendezvous", "host:1", "--", "true").returncode, 125)

    def test_nobody_is_given_the_port_of_the_rendezvous(self):
        """Rank 0 listens at it with SO_REUSEADDR, however late it comes."""
        done = run("-n", "1", "--", sys.executable, "-c", BIND)
        self.assertEqual(done.stdout, "[0] taken\n[0] listens\n", done.stderr)

    def test_variables_replace_inherited_ones(self):
        done = sh(1, "env | grep ^SOTTO_RANK=", env={**os.environ, "SOTTO_RANK": "77"})
        self.assertEqual(done.stdout, "[0] SOTTO_RANK=0\n")

    def test_long_lines_stay_whole_and_the_last_needs_no_newline(self):
        done = sh(4, "for i in 1 2 3 4 5; do head -c 100000 /dev/zero | tr '\\0' $SOTTO_RANK; echo; done; printf end")
        self.assertEqual(done.returncode, 0)
        lines = done.stdout.splitlines()
        self.assertEqual(len(lines), 4 * 6)
        for rank in "0123":
            self.assertEqual(lines.count(f"[{rank}] " + rank * 100000), 5)
            self.assertEqual(lines.count(f"[{rank}] end"), 1)

    def test_overwritten_text_is_dropped(self):
        self.assertEqual(sh(1, r"printf 'one\rtwo\r\nthree\n'").stdout, "[0] two\n[0] three\n")

    def test_raw_rank_is_untouched(self):
        done = subprocess.run([program(), "-n", "2", "--raw-rank", "1", "--", "sh", "-c", r"printf 'a\rb'; printf 'c\rd' >&2"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=LIMIT_S)
        self.assertIn(done.stdout, (b"a\rb[0] b\n", b"[0] b\na\rb"))
        self.assertIn(b"c\rd", done.stderr)

    def test_rank_0_draws_on_the_terminal(self):
        master, slave = pty.openpty()
        process = subprocess.Popen([program(), "-n", "2", "--", "sh", "-c", "[ -t 1 ] && echo tty-$SOTTO_RANK || echo no-$SOTTO_RANK"],
                                   stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        text = b""
        try:
            while True:
                text += os.read(master, 4096)
        except OSError:
            pass  # the terminal's other end is closed
        os.close(master)
        self.assertEqual(process.wait(LIMIT_S), 0)
        self.assertIn(b"tty-0", text)
        self.assertNotIn(b"[0]", text)
        self.assertIn(b"\r\x1b[K[1] no-1", text)

    def test_standard_input_is_empty(self):
        self.assertEqual(sh(2, "wc -c", stdin=subprocess.DEVNULL).stdout.split().count("0"), 2)

    def test_what_cannot_be_written_is_told_once_and_fails_at_the_end(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            for code in (0, 3):
                done = run("-n", "1", "--", "sh", "-c", f"echo a; sleep 0.1; echo b; sleep 0.1; echo c >&2; exit {code}",
                           stdout=full)
                self.assertEqual(done.returncode, code or 125)
                told = "sotto-run: cannot write standard output: No space left on device\n[0] c\n"
                self.assertEqual(done.stderr[:len(told)], told)
                self.assertEqual(done.stderr.count("cannot write"), 1)
            done = run("-n", "1", "--", "sh", "-c", "echo a >&2; echo b", stderr=full)
            self.assertEqual((done.returncode, done.stdout), (125, "[0] b\n"))
            self.assertEqual(run("--help", stdout=full).returncode, 125)

    def test_standard_streams_that_are_closed(self):
        """Pipes and descriptors of sotto-run's own never take their numbers."""
        def start(closed, script, *options):
            return sh(2, script, *options, preexec_fn=lambda: [os.close(fd) for fd in closed])

        done = start((0,), "cat; echo $SOTTO_RANK")
        self.assertEqual((done.returncode, sorted(done.stdout.split("\n"))), (0, ["", "[0] 0", "[1] 1"]), done.stderr)
        for closed in ((1,), (0, 1)):
            done = start(closed, "echo $SOTTO_RANK")
            self.assertEqual((done.returncode, done.stderr), (125, "sotto-run: cannot write standard output: Bad file descriptor\n"))
        self.assertEqual(start((1,), "echo $SOTTO_RANK >&2").returncode, 0)
        self.assertEqual(start((1,), "echo $SOTTO_RANK || exit 7", "--raw-rank", "0").returncode, 7, "rank 0 cannot write")
        done = start((0, 2), "echo $SOTTO_RANK")
        self.assertEqual((done.returncode, sorted(done.stdout.split("\n"))), (0, ["", "[0] 0", "[1] 1"]))
        with tempfile.TemporaryDirectory() as folder:
            done = start((0, 1, 2), f"echo $SOTTO_WORLD_SIZE > {folder}/$SOTTO_RANK")
            self.assertEqual(done.returncode, 0)
            self.assertEqual([Path(folder, rank).read_text(encoding="ascii") for rank in "01"], ["2\n", "2\n"])

    def test_a_reader_that_has_gone_is_no_failure(self):
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = run("-n", "1", "--", "sh", "-c", "echo a", stdout=write_end,
                   preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN))
        os.close(write_end)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_a_daemon_that_holds_the_output_does_not_hold_up_the_run(self):
        with PidFiles() as files:
            done = sh(1, f"setsid sh -c 'echo $$ > {files.folder.name}/0; exec sleep 1000' & "
                         f"while [ ! -s {files.folder.name}/0 ]; do sleep 0.01; done; echo out")
            for pid in files.pids():
                os.kill(pid, signal.SIGKILL)
        self.assertEqual((done.returncode, done.stdout), (0, "[0] out\n"))


class ExitCodes(unittest.TestCase):
    def test_passed_on(self):
        for code in (1, 7, 255):
            self.assertEqual(sh(2, f"[ $SOTTO_RANK = 0 ] || exit {code}").returncode, code)

    def test_signal_of_a_rank(self):
        done = sh(2, "[ $SOTTO_RANK = 0 ] || kill -KILL $$")
        self.assertEqual(done.returncode, 128 + 9)
        self.assertIn("rank 1 failed first, with signal 9 (Killed); it printed nothing", done.stderr)

    def test_unknown_program(self):
        done = run("-n", "2", "--", "no-such-program-here")
        self.assertEqual(done.returncode, 127)
        self.assertEqual(done.stderr, "sotto-run: cannot start rank 0: no-such-program-here: No such file or directory\n")
        done = run("-n", "2", "--", "/etc/passwd")
        self.assertEqual(done.returncode, 126)
        self.assertIn("Permission denied", done.stderr)

    def test_usage(self):
        for args, word in (((), "--ranks"), (("-n", "0", "--", "true"), "ranks"), (("-n", "x", "--", "true"), "ranks"),
                           (("-n", "1"), "no program given"), (("-n", "1", "--"), "no program given"),
                           (("-n", "2", "--raw-rank", "2", "--", "true"), "--raw-rank is 2, allowed 0 to 1"),
                           (("-n", "1", "--wrapper", "a 'b", "--", "true"), "open quote"),
                           (("-n", "1", "--bogus", "1", "--", "true"), "unknown option --bogus"),
                           (("-n", "1", "--timeout", "-1", "--", "true"), "--timeout: found -1, allowed is a number from 0 to 1e+08"),
                           (("-n", "1", "--timeout", "nan", "--", "true"), "--timeout: found nan, allowed is a number"),
                           (("-n", "1", "--grace", "nan", "--", "true"), "--grace: found nan, allowed is a number"),
                           (("-n", "1", "--grace", "inf", "--", "true"), "--grace: found inf, allowed is a number"),
                           (("--hosts", "a:1", "--host-timeout", "nan", "--", "true"), "--host-timeout: found nan, allowed is a number"),
                           (("-n", "1", "-n", "2", "-n", "3", "--", "true"), "--ranks: found 3 times, allowed is once"),
                           (("-n", "-1", "--", "true"), "--ranks: found -1, allowed is a whole number from 1 to "),
                           (("-n", "1.5", "--", "true"), "--ranks: found 1.5, allowed is a whole number from 1 to ")):
            done = run(*args)
            self.assertEqual(done.returncode, 125, args)
            self.assertIn(word, done.stderr)
        self.assertEqual(sh("010", "echo $SOTTO_WORLD_SIZE").stdout.count("] 10\n"), 10, "no octal number")
        self.assertEqual(run("--help").returncode, 0)
        self.assertIn("Exit code", run("--help").stdout)
        self.assertRegex(run("--version").stdout, r"^sotto-run [0-9]+\.[0-9]+\.[0-9]+\n$")

    def test_options_of_the_program_are_its_own(self):
        for border in ((), ("--",)):
            done = run("-n", "1", *border, "printf", "%s,", "-n", "--timeout", "--help", "--")
            self.assertEqual(done.stdout, "[0] -n,--timeout,--help,--,\n", border)

    def test_wrapper(self):
        done = run("-n", "2", "--wrapper", "env 'A=b c' sh -c 'echo $SOTTO_RANK:$A:\"$@\"' x", "--", "p", "q")
        self.assertEqual(sorted(done.stdout.splitlines()), ["[0] 0:b c:p q", "[1] 1:b c:p q"])


class Failure(unittest.TestCase):
    def test_first_failing_message_is_last(self):
        # The others notice, fail too and say more.
        with PidFiles() as files:
            done = sh(4, f"case $SOTTO_RANK in 2) echo real reason >&2; {files.script('exit 3')};; "
                         f"*) {files.wait_for_the_end_of(2)}; echo lost rank 2 >&2; exit 9;; esac")
        self.assertEqual(done.returncode, 3)
        self.assertTrue(done.stderr.endswith(
            "sotto-run: rank 2 failed first, with exit code 3; its last messages:\n[2] real reason\n"), done.stderr)

    def test_standard_output_counts_when_nothing_is_on_standard_error(self):
        done = sh(2, "[ $SOTTO_RANK = 1 ] && { seq 1 30; exit 4; }; exit 0")
        self.assertTrue(done.stderr.endswith("messages:\n" + "".join(f"[1] {i}\n" for i in range(11, 31))), done.stderr)

    def test_others_get_the_grace_period(self):
        with PidFiles() as files:
            done = sh(2, f"[ $SOTTO_RANK = 1 ] && {{ {files.script('exit 5')}; }}; {files.wait_for_the_end_of(1)}; echo finished",
                      "--grace", "1000")
        self.assertEqual((done.returncode, done.stdout), (5, "[0] finished\n"))

    def test_then_sigterm(self):
        with PidFiles() as files:
            done = sh(2, f"[ $SOTTO_RANK = 1 ] && {{ {files.wait_for('trap', 0)}; exit 5; }}; "
                         f"trap 'echo told; exit 0' TERM; {files.note('trap')}; sleep 1000 & wait", "--grace", "0.2")
        self.assertEqual((done.returncode, done.stdout), (5, "[0] told\n"))
        self.assertIn("sotto-run: ending rank 0\n", done.stderr)

    def test_a_stopped_rank_hears_sigterm(self):
        with PidFiles() as files:
            stopped = f"grep -q '^State:.T' /proc/$(cut -d' ' -f1 {files.folder.name}/0)/status"
            waits = f"{files.wait_for('trap', 0)}; until {stopped}; do sleep 0.02; done"
            stops = files.script(f"trap 'echo told; exit 0' TERM; {files.note('trap')}; kill -STOP $$; sleep 1000")
            done = sh(2, f"[ $SOTTO_RANK = 1 ] && {{ {waits}; exit 5; }}; {stops}", "--grace", "0.1")
        self.assertEqual((done.returncode, done.stdout), (5, "[0] told\n"))

    def test_then_sigkill(self):
        begin = time.monotonic()
        with PidFiles() as files:
            done = sh(2, f"[ $SOTTO_RANK = 1 ] && {{ {files.wait_for('trap', 0)}; exit 5; }}; "
                         f"trap '' TERM; {files.note('trap')}; while :; do sleep 1; done", "--grace", "0.1")
        self.assertEqual(done.returncode, 5)
        self.assertGreater(time.monotonic() - begin, 4)

    def test_time_limit(self):
        for limit in (0.5, 5, 50):  # a busy machine needs longer for the end of rank 1
            done = sh(2, "[ $SOTTO_RANK = 1 ] || sleep 1000", "--timeout", str(limit))
            self.assertEqual(done.returncode, 124)
            self.assertIn(f"the time limit of {limit:g} s is over; rank 0", done.stderr)
            if "rank 0, 1 was still running" not in done.stderr:
                break
        self.assertIn("; rank 0 was still running", done.stderr)


class Readers(unittest.TestCase):
    """Of what sotto-run prints."""

    def start(self, *args, **kwargs):
        return subprocess.Popen([program(), *args], stdout=subprocess.PIPE, **{"stderr": subprocess.PIPE, **kwargs})

    def test_one_that_stalls_holds_up_no_time_limit(self):
        with self.start("-n", "2", "--timeout", "1", "--grace", "0.2", "--", "yes") as process:
            self.assertEqual(process.wait(LIMIT_S), 124)
            error = process.stderr.read().decode()
        self.assertIn("sotto-run: the time limit of 1 s is over; rank 0, 1 was still running\n", error)
        self.assertRegex(error, r"sotto-run: nothing reads standard output; [0-9]+ bytes are lost\n")

    def test_one_that_stalls_holds_up_no_signal(self):
        with self.start("-n", "2", "--grace", "0.2", "--", "yes") as process:
            # But for pages of the pipe that are not full.
            waiting = lambda: int.from_bytes(fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)
            self.assertTrue(wait_until(lambda: waiting() >= 56 * 1024), waiting())
            process.terminate()
            self.assertEqual(process.wait(LIMIT_S), 143)
            self.assertIn("ended by signal 15", process.stderr.read().decode())

    def test_one_that_stalls_at_the_end_holds_up_no_time_limit(self):
        for last, code, text in (("true", 124, "the time limit of 1 s is over; output had not been read\n"), ("exit 3", 3, "rank 0 failed first")):
            with self.start("-n", "1", "--timeout", "1", "--grace", "0.2", "--", "sh", "-c", f"seq 50000; {last}") as process:
                self.assertEqual(process.wait(LIMIT_S), code)
                self.assertIn(text, process.stderr.read().decode())

    def test_one_that_has_seen_enough_ends_no_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            script = f"seq 100000; sleep 0.2; seq 100000; touch {folder}/$SOTTO_RANK; exit 3"
            with self.start("-n", "2", "--grace", "5", "--", "sh", "-c", script) as process:
                self.assertTrue(process.stdout.readline())
                process.stdout.close()
                self.assertEqual(process.wait(LIMIT_S), 3)
                error = process.stderr.read().decode()
            self.assertTrue(os.listdir(folder))
        self.assertIn("failed first", error)
        self.assertNotIn("cannot write", error)

    def test_one_that_is_slow_gets_everything(self):
        # Both streams go to one pipe; ranks wait for its reader.
        script = "seq 300000; seq 300000 >&2; echo end"
        with self.start("-n", "2", "--", "sh", "-c", script, stderr=subprocess.STDOUT) as process:
            time.sleep(1)
            lines = process.stdout.read().decode().splitlines()
            self.assertEqual(process.wait(LIMIT_S), 0)
        for rank in "01":
            mine = [line[4:] for line in lines if line.startswith(f"[{rank}] ")]
            self.assertEqual(sorted(mine), sorted([str(n) for n in range(1, 300001)] * 2 + ["end"]))
        self.assertEqual(len(lines), 2 * 600001, "lines do not mix")


class NoOrphans(unittest.TestCase):
    def start(self, files, rest="wait", *options, **kwargs):
        process = subprocess.Popen([program(), "-n", "2", *options, "--", "sh", "-c", files.script(rest)],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **kwargs)
        self.assertTrue(wait_until(lambda: len(files.pids()) == 4))
        return process

    def check_gone(self, pids):
        self.assertTrue(wait_until(lambda: not any(alive(pid) for pid in pids)), pids)

    def test_signals_end_all_ranks(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with PidFiles() as files:
                process = self.start(files)
                pids = files.pids()
                process.send_signal(number)
                error = process.communicate(timeout=LIMIT_S)[1]
                self.assertEqual(process.returncode, 128 + number)
                self.assertIn(f"sotto-run: ended by signal {int(number)} (", error)
                self.check_gone(pids)

    def test_signals_that_are_ignored_from_the_start_end_nothing(self):
        """As behind nohup, and as a shell does it for what it starts in the background."""
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            with PidFiles() as files:
                ignored = f"[ $((0x$(sed -n 's/^SigIgn:.//p' /proc/self/status) >> {number - 1} & 1)) = 1 ]"
                process = self.start(files, f"{files.wait_for('sent', 'all')}; {ignored} && echo ignored >&2",
                                     preexec_fn=lambda number=number: signal.signal(number, signal.SIG_IGN))
                process.send_signal(number)
                with open(f"{files.folder.name}/sent.all.tmp", "wb"):
                    pass
                error = process.communicate(timeout=LIMIT_S)[1]
                self.assertEqual((process.returncode, sorted(error.splitlines())), (0, ["[0] ignored", "[1] ignored"]))

    def test_signals_for_ranks_end_nothing_else(self):
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            with PidFiles() as files:
                name = number.name[3:]
                process = self.start(files, f"trap 'echo told {name} >&2; exit 0' {name}; {files.note('trap')}; while :; do sleep 0.1; done")
                self.assertTrue(wait_until(lambda files=files: files.noted("trap", 0) and files.noted("trap", 1)))
                process.send_signal(number)
                error = process.communicate(timeout=LIMIT_S)[1]
                self.assertEqual(process.returncode, 0)
                self.assertEqual(sorted(line for line in error.splitlines() if "told" in line), [f"[0] told {name}", f"[1] told {name}"])
                self.assertNotIn("sotto-run", error)

    def test_a_parent_that_ignores_its_children(self):
        done = sh(2, "exit 3", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN), timeout=LIMIT_S)
        self.assertEqual(done.returncode, 3, done.stderr)

    def test_second_signal_kills_at_once(self):
        with PidFiles() as files:
            process = self.start(files, f"trap '{files.note('told')}' INT; {files.note('trap')}; while :; do sleep 1; done",
                                 "--grace", "1000")
            self.assertTrue(wait_until(lambda: files.noted("trap", 0) and files.noted("trap", 1)))
            pids = files.pids()
            process.send_signal(signal.SIGINT)
            self.assertTrue(wait_until(lambda: files.noted("told", 0) and files.noted("told", 1)))
            self.assertIsNone(process.poll())
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=LIMIT_S)
            self.assertEqual(process.returncode, 130)
            self.check_gone(pids)

    def test_children_of_a_rank_end_with_it(self):
        with PidFiles() as files:
            done = sh(2, files.script("exit 0"))
            self.assertEqual(done.returncode, 0)
            self.assertEqual(len(files.pids()), 4)
            self.check_gone(files.pids())

    def test_killed_sotto_run_leaves_nothing(self):
        with PidFiles() as files:
            process = self.start(files)
            pids = files.pids()
            process.kill()
            process.communicate(timeout=LIMIT_S)
            self.check_gone(pids)

    def test_ctrl_c_on_a_terminal(self):
        with PidFiles() as files:
            master, slave = pty.openpty()
            process = subprocess.Popen([program(), "-n", "2", "--", "sh", "-c", files.script("wait")], stdin=slave, stdout=slave,
                                       stderr=slave, start_new_session=True,
                                       preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0))
            os.close(slave)
            self.assertTrue(wait_until(lambda: len(files.pids()) == 4))
            pids = files.pids()
            os.write(master, b"\x03")
            self.assertEqual(process.wait(LIMIT_S), 130)
            os.close(master)
            self.check_gone(pids)


if __name__ == "__main__":
    take_program()
    unittest.main()
