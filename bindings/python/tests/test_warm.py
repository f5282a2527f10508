"""Programs that are forks of a process with modules: as if each had its own interpreter."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm

LIMIT_S = 60
SAYS_ALL = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "path": sys.path[:2], "name": __name__,
    "variable": os.environ.get("VARIABLE"), "home": os.environ.get("HOME"),
    "title": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0)),
    "in": sys.stdin.read(), "warm": "colorsys" in set(sys.modules) - {"__main__"},
    "own": "sotto" in sys.modules, "main": sys.modules["__main__"].__dict__ is globals(),
}))
print("to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.fixture(scope="module")
def python():
    return warm.python("colorsys", "numpy")


def run(*words, **options):
    options = {"capture_output": True, "text": True, "timeout": LIMIT_S, "check": False, **options}
    return subprocess.run(list(map(str, words)), **options)


def is_over(process):
    """Whether a process in /proc has ended; who inherits it may leave it there."""
    try:
        state = (process / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state in "ZX"


def wait_until(condition):
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"not in {LIMIT_S} s"
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["file", "module", "string"])
def test_a_program_gets_what_it_was_given(python, tmp_path, how):
    (tmp_path / "says_all.py").write_text(SAYS_ALL)
    words = {
        "file": [tmp_path / "says_all.py"],
        "module": ["-m", "says_all"],
        "string": ["-c", SAYS_ALL],
    }[how]
    environment = {"PYTHONPATH": str(tmp_path), "VARIABLE": "\udcff \u00e4 ="}
    told = []
    for command in (python, sys.executable):
        done = run(
            *(command, "-B", "-u", *words, "x", "", "y z"),
            cwd=tmp_path,
            env=environment,
            input="given",
        )
        assert (done.returncode, done.stderr) == (7, "to stderr\n"), done
        told.append(json.loads(done.stdout))
    mine, theirs = told
    assert (mine.pop("warm"), theirs.pop("warm")) == (True, False)
    assert mine["argv"][1:] == ["x", "", "y z"]
    for said in told:  # the interpreter of a virtual environment has another path in /proc
        assert said["title"][-3:] == ["x", "", "y z"]
        assert said["title"][1:3] == ["-B", "-u"]
        del said["title"]
    assert mine == theirs


def test_imports_of_a_program_are_its_own(python, tmp_path):
    (tmp_path / "mine.py").write_text("import colorsys\ncolorsys.changed = 1\n")
    for _ in range(2):
        done = run(
            python,
            "-c",
            "import colorsys\nassert not hasattr(colorsys, 'changed')\nimport mine",
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr


def test_random_numbers_differ(python):
    code = "import random, numpy\nprint(random.random(), numpy.random.random())"
    first, second = (run(python, "-c", code).stdout.split() for _ in range(2))
    assert len({*first, *second}) == 4


def test_the_end_is_that_of_an_interpreter(python):
    """Destructors, what was registered for the exit, and C's buffers."""
    code = """
import atexit, ctypes
class Last:
    def __del__(self):
        print("destroyed")
kept = Last()
atexit.register(print, "at exit")
ctypes.CDLL(None).printf(b"by C\\n")
print("end")
"""
    done = run(python, "-c", code)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "at exit", "by C", "destroyed", "end"]
    done = run(python, "-c", "1 / 0")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert run(python, "-c", "import os; os._exit(9)").returncode == 9


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_program_that_a_signal_ends(python, number):
    done = run(python, "-c", f"import os; os.kill(os.getpid(), {int(number)})")
    assert done.returncode == -number


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
print(os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def waiting(python):
    """A program that waits: what a launcher sees of it, and its process."""
    with subprocess.Popen([python, "-c", WAITS], stdout=subprocess.PIPE, text=True) as seen:
        process = Path("/proc", seen.stdout.readline().strip())
        assert process.is_dir()
        yield seen, process
        seen.kill()
    wait_until(lambda: is_over(process))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -15), (signal.SIGUSR1, 5), (signal.SIGKILL, -9)]
)
def test_signals_are_passed_on(waiting, number, code):
    seen, process = waiting
    seen.send_signal(number)
    assert seen.wait(LIMIT_S) == code
    wait_until(lambda: is_over(process))


def test_one_that_is_killed_takes_what_it_has_started_along(python):
    code = (
        "import subprocess as s; p = s.Popen(['sleep', '99']); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True) as seen:
        process = Path("/proc", seen.stdout.readline().strip())
        assert process.is_dir()
        seen.kill()
    wait_until(lambda: is_over(process))


def test_many_programs_at_a_time(python):
    started = [
        subprocess.Popen(
            [python, "-c", f"import time; time.sleep(0.1); raise SystemExit({n})"],
        )
        for n in range(12)
    ]
    assert [program.wait(LIMIT_S) for program in started] == list(range(12))


def test_options_of_the_interpreter_are_refused(python):
    done = run(python, "-W", "error", "-c", "pass")
    assert done.returncode == 1
    assert "option -W of Python is not known here; allowed: -B, -u, -c, -m" in done.stderr


@pytest.mark.parametrize("how", ["killed", "group"])
def test_programs_end_with_who_asked_for_them(tmp_path, how):
    """Also where that was killed, or the server had the signal too."""
    code = f"""
import os, subprocess, sys
sys.path.insert(0, {str(warm.HERE)!r})
import warm
subprocess.run([warm.python("colorsys"), "-c", {WAITS!r}])
"""
    temporary = tmp_path / ("long" * 30)
    temporary.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "WARM_PYTHON"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**environment, "TMPDIR": str(temporary)},
    ) as asked:
        process = Path("/proc", asked.stdout.readline().strip())
        assert process.is_dir()
        asked.kill() if how == "killed" else os.killpg(asked.pid, signal.SIGTERM)
    wait_until(lambda: is_over(process))
    wait_until(lambda: not any(temporary.iterdir()))


def test_a_module_that_cannot_be_imported():
    with pytest.raises(AssertionError, match="importing not_a_module_here failed"):
        warm.python("not_a_module_here")


def test_a_module_that_starts_a_thread(tmp_path):
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1,)).start()\n"
    )
    done = run(
        *(sys.executable, warm.HERE / "warm_server.py", tmp_path, "title", "threaded"),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert done.stderr == "importing threaded started threads, which forks would not have\n"


def test_one_made_from_another(python, monkeypatch):
    """It has the modules of both."""
    monkeypatch.setenv("WARM_PYTHON", python)
    both = warm.python("colorsys", "wave")
    code = "import sys; print({'colorsys', 'wave'} <= set(sys.modules))"
    assert run(both, "-c", code).stdout == "True\n"
    assert warm.python("torch") == python
