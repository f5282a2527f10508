#!/usr/bin/python3
"""sotto-run --hosts with remote shells that stay on this machine: hosts_test.py PATH-OF-SOTTO-RUN"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import unittest

from running import BIND, LIMIT_S, PidFiles, alive, program, take_program, wait_until

TWO = "127.0.0.1:2,two:2"
# Called as ssh is, with a host and a string. As behind ssh, what runs is out of reach of signals to the shell.
RSH = """#!/bin/sh
echo $$ > {folder}/rsh.$1.tmp
mv {folder}/rsh.$1.tmp {folder}/rsh.$1
{before}
exec setsid -w sh -c "$2"
"""
SHOW = "echo $SOTTO_RANK/$SOTTO_WORLD_SIZE $SOTTO_LOCAL_RANK/$SOTTO_LOCAL_SIZE; echo err-$SOTTO_RANK >&2"


class Case(unittest.TestCase):
    def setUp(self):
        self.files = PidFiles()
        self.addCleanup(self.files.folder.cleanup)
        self.folder = self.files.folder.name
        self.shell("")

    def shell(self, before, text=RSH):
        """before: what the remote shell does first."""
        self.rsh = os.path.join(self.folder, "rsh")
        with open(self.rsh, "w", encoding="utf-8") as f:
            f.write(text.format(folder=self.folder, before=before))
        os.chmod(self.rsh, 0o755)

    def words(self, *args, hosts=TWO):
        return [program(), "--hosts", hosts, "--rsh", shlex.quote(self.rsh), *args]

    def run_it(self, *args, hosts=TWO, text=True, **kwargs):
        return subprocess.run(self.words(*args, hosts=hosts), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=text,
                              timeout=LIMIT_S, **kwargs)

    def sh(self, script, *options, **kwargs):
        return self.run_it(*options, "--", "sh", "-c", script, **kwargs)

    def shell_pid(self, host):
        with open(f"{self.folder}/rsh.{host}", encoding="ascii") as f:
            return int(f.read())

    def agent(self, rank):
        """The agent that a rank of a script has noted its parent for."""
        with open(f"{self.folder}/agent.{rank}", encoding="ascii") as f:
            return int(f.read())

    def start(self, rest="wait", *options, hosts=TWO, ranks=4, **kwargs):
        """A run whose ranks have children, and wait; ends when they do so."""
        note = f"echo $PPID > {self.folder}/agent.$SOTTO_RANK; "
        process = subprocess.Popen(self.words(*options, "--", "sh", "-c", note + self.files.script(rest), hosts=hosts),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)
        self.addCleanup(self.end, process)
        self.assertTrue(wait_until(lambda: len(self.files.pids()) == 2 * ranks))
        agents = {self.agent(rank) for rank in range(ranks)}
        shells = [self.shell_pid(entry.rpartition(":")[0]) for entry in hosts.split(",")]
        self.everything = [*self.files.pids(), *agents, *shells]
        self.assertEqual(len(agents), len(shells))
        return process

    @staticmethod
    def end(process):
        process.kill()
        process.communicate()

    def check_gone(self):
        self.assertTrue(wait_until(lambda: not any(alive(pid) for pid in self.everything)), self.everything)

    def check_failed(self, done, text, code=125):
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertIn(text, done.stderr)


class Output(Case):
    def test_prefix_and_variables(self):
        done = self.sh(SHOW, hosts="127.0.0.1:1,alice@two:3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(done.stdout.splitlines()), ["[0] 0/4 0/1", "[1] 1/4 0/3", "[2] 2/4 1/3", "[3] 3/4 2/3"])
        self.assertEqual(sorted(done.stderr.splitlines()), [f"[{r}] err-{r}" for r in range(4)])
        self.assertTrue(os.path.exists(f"{self.folder}/rsh.alice@two"))

    def test_words_arrive_as_they_are(self):
        words = ["a b", "", "it's", '"', "$HOME `id` $(id)", "back\\slash", "two\nlines", "*", "!x", "-n", "--", "umlaut ü"]
        code = "import os, sys; print([os.fsencode(word) for word in sys.argv[1:]])"
        done = self.run_it("--", sys.executable, "-c", code, *words, b"\xff\xfe")
        expected = [os.fsencode(word) for word in [*words, b"\xff\xfe"]]
        self.assertEqual(sorted(done.stdout.splitlines()), [f"[{r}] {expected}" for r in range(4)], done.stderr)

    def test_path_of_sotto_run_there(self):
        folder = f"{self.folder}/a 'b' \"$c\"\n(d)"
        os.mkdir(folder)
        os.symlink(program(), f"{folder}/run it")
        done = self.sh("echo $SOTTO_RANK", "--remote-run", f"{folder}/run it")
        self.assertEqual((done.returncode, sorted(done.stdout.split())), (0, sorted("[0] 0 [1] 1 [2] 2 [3] 3".split())), done.stderr)
        os.symlink(program(), f"{self.folder}/there")
        self.shell(f"PATH=$PATH:{self.folder}")
        self.assertEqual(self.sh("exit 0", "--remote-run", "there").returncode, 0)

    def test_words_of_the_remote_shell(self):
        self.rsh = f"env 'A=b c' {self.rsh}"
        done = subprocess.run([program(), "--hosts", "127.0.0.1:1", "--rsh", self.rsh, "--", "sh", "-c", "echo $A"],
                              stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
        self.assertEqual(done.stdout, "[0] b c\n")

    def test_what_a_login_shell_prints_is_shown_and_no_output(self):
        self.shell("echo Welcome to $1; printf 'no line end'; echo warned >&2")
        done = self.sh("echo $SOTTO_RANK")
        self.assertEqual(sorted(done.stdout.splitlines()), [f"[{r}] {r}" for r in range(4)])
        lines = sorted(line for line in done.stderr.splitlines() if "warned" not in line)
        self.assertEqual(lines, sorted(f"[{host}] {text}" for host in ("127.0.0.1", "two")
                                       for text in (f"Welcome to {host}", "no line end")))
        self.assertIn("[two] warned\n", done.stderr)

    def test_much_output_stays_whole_behind_a_slow_reader(self):
        """Nobody reads for longer than a host may be silent. A busy machine needs longer to say that it lives."""
        for limit in (1, 10):
            process, out, err = self.read_late(limit)
            if process.returncode == 0:
                break
        self.assertEqual(process.returncode, 0, err)
        lines = out.splitlines()
        self.assertEqual(len(lines), 4 * 21)
        for r in "0123":
            self.assertEqual((lines.count(f"[{r}] " + r * 99999), lines.count(f"[{r}] {r}end")), (20, 1))

    def read_late(self, limit):
        rank = "import os; r = os.environ['SOTTO_RANK']; [print(r * 99999) for i in range(20)]; print(r + 'end', end='')"
        process = subprocess.Popen(self.words("--host-timeout", str(limit), "--", sys.executable, "-c", rank),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(2 * limit)
        return process, *process.communicate(timeout=LIMIT_S)

    def test_raw_rank(self):
        done = self.run_it("--raw-rank", "3", "--", "sh", "-c", r"[ $SOTTO_RANK = 3 ] && printf 'a\rb\rc'; exit 0", text=False)
        self.assertEqual(done.stdout, b"a\rb\rc")

    def test_standard_input_is_empty(self):
        self.assertEqual(self.sh("wc -c").stdout.split().count("0"), 4)


class Surroundings(Case):
    def setUp(self):
        super().setUp()
        self.shell('exec env -i PATH="$PATH" SOTTO_RANK=77 setsid -w sh -c "$2"')

    def test_variables(self):
        environment = {**os.environ, "SOTTO_X": "a b\nc", "SOTTO_RANK": "9", "SOTTO_Y": "here", "OTHER": "1", "NAMED": "it's"}
        done = self.sh('echo "$SOTTO_X|$SOTTO_RANK|$SOTTO_Y|$OTHER|$NAMED|$GIVEN"', "-x", "NAMED", "--env", "GIVEN=x=y", "-x",
                       "SOTTO_Y=there", env=environment, hosts="127.0.0.1:1")
        self.assertEqual(done.stdout, "[0] a b\n[0] c|0|there||it's|x=y\n", done.stderr)
        for words, text in ((("-x", "NOT_SET"), "-x NOT_SET: it is not set here"), (("-x", "=1"), "-x '=1': expected NAME"),
                            (("-x", "SOTTO_RANK=1"), "-x SOTTO_RANK: sotto-run sets it"),
                            (("-x", "A=1", "-x", "A=2"), "-x A: it is named twice")):
            self.check_failed(self.run_it(*words, "--", "true"), text)

    def test_variables_of_one_machine_stay_there(self):
        script = 'echo "$SOTTO_HOST_ID|$SOTTO_ADVERTISE|$SOTTO_LISTEN"'
        environment = {**os.environ, "SOTTO_HOST_ID": "a", "SOTTO_ADVERTISE": "10.0.0.1", "SOTTO_LISTEN": "any"}
        self.assertEqual(self.sh(script, env=environment, hosts="127.0.0.1:1").stdout, "[0] ||any\n")
        done = self.sh(script, "-x", "SOTTO_HOST_ID", "-x", "SOTTO_ADVERTISE=:7", env=environment, hosts="127.0.0.1:1")
        self.assertEqual(done.stdout, "[0] a|:7|any\n")

    def test_working_directory(self):
        folder = f"{self.folder}/here"
        link = f"{self.folder}/link"
        os.mkdir(folder)
        os.symlink(folder, link)
        self.assertEqual(self.sh("pwd", hosts="127.0.0.1:1", cwd=folder).stdout, f"[0] {folder}\n")
        done = self.sh("echo $PWD; pwd -P", hosts="127.0.0.1:1", cwd=link, env={**os.environ, "PWD": link})
        self.assertEqual(done.stdout, f"[0] {folder}\n[0] {folder}\n")
        self.shell('rmdir "$PWD"')
        self.check_failed(self.sh("true", hosts="two:2", cwd=folder),
                          f"sotto-run: host two: working directory {folder}: No such file or directory\n")

    def test_rendezvous(self):
        script = "echo $SOTTO_RENDEZVOUS"
        places = {line.split()[1] for line in self.sh(script).stdout.splitlines()}
        self.assertEqual(len(places), 1)
        self.assertRegex(places.pop(), r"^tcp://127\.0\.0\.1:[0-9]+$")
        self.assertRegex(self.sh(script, hosts="whatever:1").stdout, r"^\[0\] tcp://127\.0\.0\.1:[0-9]+\n$")
        done = self.sh(script, "--rendezvous", "tcp://10.0.0.1:7000", hosts="one:1,two:1")
        self.assertEqual(sorted(done.stdout.splitlines()), [f"[{r}] tcp://10.0.0.1:7000" for r in range(2)])
        if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6"):
            self.assertRegex(self.sh(script, hosts="[::1]:1,two:1").stdout, r"^\[[01]\] tcp://\[::1\]:[0-9]+\n")
        no_place = "no address there at which the other hosts reach rank 0: "
        self.check_failed(self.sh(script, hosts="localhost:1,two:1"), f"host localhost: {no_place}the name means none, or loopback")
        self.check_failed(self.sh(script, hosts="192.0.2.1:1,two:1"), f"host 192.0.2.1: {no_place}192.0.2.1 is not one of")

    def test_nobody_is_given_the_port_of_the_rendezvous(self):
        done = self.run_it("--", sys.executable, "-c", BIND, hosts="127.0.0.1:1")
        self.assertEqual(done.stdout, "[0] taken\n[0] listens\n", done.stderr)


class BadInput(Case):
    def test_hosts(self):
        for hosts, text in (("", "entry '': it is empty"), ("a", "entry 'a': it has no slots"),
                            ("a:", "entry 'a:': its slots are ''"), ("a:2,b:0", "entry 'b:0': its slots are '0', allowed is a whole"),
                            ("a:-1", "its slots are '-1'"), ("a:2x", "its slots are '2x'"), ("a:4097", "its slots are '4097'"),
                            ("a:99999999999999999999", "allowed is a whole number 1 to 4096"),
                            ("a:4000,b:97", "up to entry 'b:97' there are 4097 ranks; allowed are 4096"),
                            ("a:2,b:1,A:2", "entry 'A:2': host A stands in the list already"),
                            ("a:2,u@a:2", "entry 'u@a:2': host a stands in the list already"),
                            (":2", "entry ':2': its name is empty"), ("u@:2", "its name is empty"), ("@a:2", "its name is empty"),
                            ("a:2,", "entry '': it is empty"), ("a:2,,b:2", "entry '': it is empty"),
                            ("-oProxyCommand=x:2", "a name begins with '-'"), ("u@-a:2", "a name begins with '-'"),
                            ("a b:2", "entry 'a b:2': a name has letters"), ("a;b:2", "a name has letters"), ("a\n:2", "a name has"),
                            ("fd00::1:2", "an IPv6 address stands in brackets"), ("[::1]", "it has no slots")):
            self.check_failed(self.run_it("--", "true", hosts=hosts), text)
            self.assertFalse(os.path.exists(f"{self.folder}/rsh.a"), hosts)

    def test_usage(self):
        for words, text in ((("-n", "3"), "-n is 3, but --hosts has 4 slots; -n may"), (("--raw-rank", "4"), "allowed 0 to 3"),
                            (("--host-timeout", "0"), "host-timeout"),
                            (("--host-timeout", "nan"), "--host-timeout: found nan"), (("--rsh", ""), "--rsh is empty"),
                            (("--rsh", "a 'b"), "--rsh has an open quote: a 'b")):
            words = [program(), "--hosts", TWO, *words, "--", "true"]
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
            self.check_failed(done, text)
        for words in (("--rsh", "x"), ("--remote-run", "x"), ("--host-timeout", "5")):
            done = subprocess.run([program(), "-n", "1", *words, "--", "true"], stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
            self.check_failed(done, f"{words[0]} requires --hosts")
        self.check_failed(self.run_it("-n", "2", "--", "true", hosts="a:1"), "-n is 2, but --hosts has 1 slot; -n may be left out")
        self.assertEqual(self.run_it("-n", "4", "--", "true").returncode, 0)

    def test_remote_shell_that_fails(self):
        self.shell("[ $1 != two ] || { echo unknown host $1 >&2; exit 255; }")
        done = self.sh("echo started")
        self.check_failed(done, "sotto-run: host two: the remote shell ended with exit code 255 before sotto-run answered there\n")
        self.assertEqual(done.stdout, "")
        self.assertIn("[two] unknown host two\n", done.stderr)
        self.shell("printf 'this account is locked'; exit 0")
        done = self.sh("true")
        self.check_failed(done, "the remote shell ended with exit code 0 before")
        self.assertRegex(done.stderr, r"\[(127.0.0.1|two)\] this account is locked\n")
        self.shell("kill -TERM $$")
        self.check_failed(self.sh("true"), "the remote shell ended with signal 15 (Terminated) before")
        self.rsh = "/nowhere/rsh"
        self.check_failed(self.sh("true"), "host 127.0.0.1: cannot start the remote shell: /nowhere/rsh: No such file")

    def test_no_sotto_run_there(self):
        done = self.sh("true", "--remote-run", "/nowhere/sotto-run", hosts="one:1")
        self.check_failed(done, "host one: the remote shell ended with exit code 127 before sotto-run answered there; it was to run "
                                "/nowhere/sotto-run, --remote-run names another program\n")

    def test_another_protocol_and_damage(self):
        self.shell(r"printf '\001sotto-run agent 0\n'; sleep 1000")
        self.check_failed(self.sh("true", hosts="one:1"), "there speaks protocol 0, this one 1")
        self.shell(r"printf '\001sotto-run agent 1\n'; echo no frame, whatever it is; sleep 1000")
        self.check_failed(self.sh("true", hosts="one:1"), "host one: what sotto-run sends from there is damaged")
        self.shell(r"printf '\001sotto-run agent 1\n'; exec sleep 1000 >&-")
        self.check_failed(self.sh("true", hosts="one:1"), "host one: the remote shell has closed its output")

    def test_a_host_that_does_not_answer(self):
        self.shell("exec sleep 1000")
        self.check_failed(self.sh("true", "--host-timeout", "1", hosts="two:2"), "host two: sotto-run has not answered there within 1 s")
        self.check_failed(self.sh("true", "--timeout", "0.5"), "the time limit of 0.5 s is over; no rank had been started", 124)

    def test_agent_that_is_given_nonsense(self):
        done = subprocess.run([program(), "--agent"], input=b"x" * 100, stdout=subprocess.PIPE, timeout=LIMIT_S)
        self.assertTrue(done.stdout.startswith(b"\x01sotto-run agent 1\n"))
        self.assertEqual(done.returncode, 0)


class Failure(Case):
    def test_exit_code_and_first_message(self):
        # The others fail too, when sotto-run has heard of the first.
        heard = f"{self.folder}/stderr"
        with open(heard, "w+", encoding="ascii") as f:
            done = subprocess.run(self.words("--", "sh", "-c", "[ $SOTTO_RANK != 2 ] || { echo real reason >&2; exit 3; }; "
                                             f"until grep -q 'rank 2 failed' {heard}; do sleep 0.02; done; echo lost it >&2; exit 9"),
                                  stderr=f, timeout=LIMIT_S)
            f.seek(0)
            text = f.read()
        self.assertEqual(done.returncode, 3, text)
        self.assertIn("[0] lost it\n", text)
        self.assertTrue(text.endswith("sotto-run: rank 2 failed first, with exit code 3; its last messages:\n[2] real reason\n"), text)

    def test_program_that_one_host_does_not_have(self):
        os.symlink("/bin/sleep", f"{self.folder}/my-sleep")
        self.shell(f"[ $1 = two ] || export PATH=$PATH:{self.folder}")
        done = self.run_it("--", "my-sleep", "1000")
        self.check_failed(done, "sotto-run: cannot start rank 2 on host two: my-sleep: No such file or directory\n", 127)

    def test_grace_and_sigterm_reach_other_hosts(self):
        done = self.sh(f"[ $SOTTO_RANK = 0 ] && {{ {self.files.wait_for('trap', 3)}; exit 5; }}; [ $SOTTO_RANK = 3 ] || exit 0; "
                       f"trap 'echo told; exit 0' TERM; {self.files.note('trap')}; sleep 1000 & wait", "--grace", "0.2")
        self.assertEqual((done.returncode, done.stdout), (5, "[3] told\n"))
        self.assertIn("sotto-run: ending rank 3\n", done.stderr)

    def test_time_limit(self):
        for limit in (1, 10):  # a busy machine needs longer to start ranks
            done = self.sh("sleep 1000", "--timeout", str(limit))
            self.assertEqual(done.returncode, 124)
            if "rank" in done.stderr:
                break
        self.assertIn(f"the time limit of {limit} s is over; rank 0, 1, 2, 3 was still running", done.stderr)


class NoOrphans(Case):
    def finish(self, process, code, text):
        error = process.communicate(timeout=LIMIT_S)[1]
        self.assertEqual(process.returncode, code, error)
        self.assertIn(text, error)
        self.check_gone()

    def test_killed_rank(self):
        process = self.start("wait", "--grace", "0")
        os.kill(self.files.pids_of(3)[0], signal.SIGKILL)
        self.finish(process, 137, "rank 3 failed first, with signal 9 (Killed)")

    def test_killed_remote_shell(self):
        process = self.start("wait", "--grace", "0")
        os.kill(self.shell_pid("two"), signal.SIGKILL)
        self.finish(process, 125, "sotto-run: host two: the remote shell ended with signal 9 (Killed); lost with it: rank 2, 3\n")

    def test_output_without_a_reader_takes_no_memory(self):
        process = self.start("exec yes")
        time.sleep(1)
        for pid in (process.pid, self.agent(0), self.agent(2)):
            with open(f"/proc/{pid}/statm", encoding="ascii") as f:
                resident, shared = (int(word) * os.sysconf("SC_PAGE_SIZE") for word in f.read().split()[1:3])
            self.assertLess(resident - shared, 60_000_000)
        process.kill()
        process.wait()
        self.check_gone()

    def test_remote_shell_killed_while_ranks_print_without_end(self):
        process = self.start("while :; do echo $SOTTO_RANK; done", "--grace", "0")
        os.kill(self.shell_pid("two"), signal.SIGKILL)
        self.finish(process, 125, "sotto-run: host two: the remote shell ended with signal 9 (Killed); lost with it: rank 2, 3\n")

    def test_signal_after_a_host_has_failed(self):
        """The first cause stays."""
        process = self.start(f"trap '' TERM; {self.files.note('trap')}; wait", "--grace", "1000")
        self.assertTrue(wait_until(lambda: all(self.files.noted("trap", rank) for rank in range(4))))
        os.kill(self.shell_pid("two"), signal.SIGKILL)
        self.assertTrue(wait_until(lambda: not any(alive(pid) for rank in (2, 3) for pid in self.files.pids_of(rank))))
        self.assertIn("rank 0, 1 may go on for 1000 s\n", process.stderr.readline())
        process.send_signal(signal.SIGINT)
        self.finish(process, 125, "sotto-run: host two: the remote shell ended with signal 9 (Killed)")

    def test_remote_shell_that_does_not_end_costs_no_time(self):
        """A host whose ranks have ended is waited for without a turn of the loop."""
        self.shell('[ $1 != two ] || { setsid -w sh -c "$2"; exec sleep 1000; }')
        process = subprocess.Popen(self.words("--host-timeout", "1", "--", "sh", "-c", "[ $SOTTO_RANK -ge 2 ] || sleep 1.6"),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.end, process)
        pid, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(process.returncode, 0)
        self.assertLess(used.ru_utime + used.ru_stime, 0.5)

    def test_killed_agent(self):
        process = self.start("wait", "--grace", "0")
        os.kill(self.agent(0), signal.SIGKILL)
        self.finish(process, 125, "sotto-run: host 127.0.0.1: the remote shell ended with ")

    def test_terminated_agent(self):
        process = self.start("wait", "--grace", "0")
        os.kill(self.agent(2), signal.SIGTERM)
        self.finish(process, 125, "sotto-run: host two: the remote shell ended with exit code 0; lost with it: rank 2, 3")

    def test_killed_sotto_run(self):
        process = self.start()
        process.kill()
        process.wait()
        self.check_gone()

    def test_sotto_run_killed_while_ranks_print_without_end(self):
        process = self.start("while :; do echo $SOTTO_RANK; done")
        process.kill()
        process.wait()
        self.check_gone()

    def test_silent_sotto_run(self):
        process = self.start("wait", "--host-timeout", "3")
        process.send_signal(signal.SIGSTOP)
        self.assertTrue(wait_until(lambda: not any(alive(pid) for pid in self.files.pids())))
        process.send_signal(signal.SIGCONT)
        self.finish(process, 125, "the remote shell ended with exit code 0; lost with it: rank ")

    def test_silent_agent(self):
        process = self.start("wait", "--host-timeout", "3", "--grace", "0", hosts="127.0.0.1:1,two:1", ranks=2)
        os.kill(self.agent(1), signal.SIGSTOP)
        error = process.communicate(timeout=LIMIT_S)[1]
        self.assertEqual(process.returncode, 125)
        self.assertIn("host two: nothing has been heard from it for 3 s; lost with it: rank 1\n", error)
        os.kill(self.agent(1), signal.SIGCONT)
        self.check_gone()

    def test_stopped_and_continued(self):
        """Its silence means nothing when it was stopped as terminals do."""
        process = self.start(self.files.wait_for("go", 0), "--host-timeout", "2", preexec_fn=lambda: os.setpgid(0, 0))
        process.send_signal(signal.SIGTSTP)
        with open(f"/proc/{process.pid}/stat", encoding="ascii") as f:
            self.assertTrue(wait_until(lambda: f.seek(0) == 0 and f.read().rsplit(")", 1)[1].split()[0] == "T"))
        time.sleep(3)
        self.assertTrue(all(alive(pid) for pid in self.everything))
        process.send_signal(signal.SIGCONT)
        with open(f"{self.folder}/go.0.tmp", "w", encoding="ascii"):
            pass
        self.finish(process, 0, "")

    def test_signals_reach_all_ranks(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.setUp()
            name = number.name[3:]
            process = self.start(f"trap 'echo told {name}; exit 0' {name}; {self.files.note('trap')}; wait", "--grace", "1000")
            self.assertTrue(wait_until(lambda: all(self.files.noted("trap", rank) for rank in range(4))))
            process.send_signal(number)
            out, error = process.communicate(timeout=LIMIT_S)
            self.assertEqual(sorted(out.splitlines()), [f"[{rank}] told {name}" for rank in range(4)])
            self.assertEqual(process.returncode, 128 + number)
            self.assertIn(f"sotto-run: ended by signal {int(number)} (", error)
            self.check_gone()

    def test_signals_for_ranks_end_nothing_else(self):
        process = self.start(f"trap 'echo told; exit 0' USR1; {self.files.note('trap')}; while :; do sleep 0.1; done")
        self.assertTrue(wait_until(lambda: all(self.files.noted("trap", rank) for rank in range(4))))
        process.send_signal(signal.SIGUSR1)
        out, error = process.communicate(timeout=LIMIT_S)
        self.assertEqual(process.returncode, 0, error)
        self.assertNotIn("sotto-run", error)
        self.assertEqual(sorted(out.splitlines()), [f"[{rank}] told" for rank in range(4)])

    def test_second_signal_kills_at_once(self):
        process = self.start(f"trap '{self.files.note('told')}' INT; {self.files.note('trap')}; while :; do sleep 1; done",
                             "--grace", "1000")
        self.assertTrue(wait_until(lambda: all(self.files.noted("trap", rank) for rank in range(4))))
        process.send_signal(signal.SIGINT)
        self.assertTrue(wait_until(lambda: all(self.files.noted("told", rank) for rank in range(4))))
        self.assertIsNone(process.poll())
        process.send_signal(signal.SIGINT)
        self.finish(process, 130, "ended by signal 2")

    def test_signal_before_the_hosts_have_answered(self):
        self.shell("exec sleep 1000")
        process = subprocess.Popen(self.words("--", "true"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.end, process)
        self.assertTrue(wait_until(lambda: all(os.path.exists(f"{self.folder}/rsh.{host}") for host in ("127.0.0.1", "two"))))
        self.everything = [self.shell_pid("127.0.0.1"), self.shell_pid("two")]
        process.send_signal(signal.SIGINT)
        self.finish(process, 130, "ended by signal 2")


if __name__ == "__main__":
    take_program()
    unittest.main()
