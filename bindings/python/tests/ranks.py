"""Ranks for tests: threads of this process, or processes started by sotto-run."""

import gc
import inspect
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import warm

import sotto

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def resident_kb():
    """KiB of memory that this process has resident."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def assert_no_leak(cycles, allowed_kb):
    """A leak grows every time; an arena of the allocator is made once."""
    grown = []
    while len(grown) < 3 and (not grown or grown[-1] >= allowed_kb):
        gc.collect()
        before = resident_kb()
        cycles()
        gc.collect()
        grown.append(resident_kb() - before)
    assert grown[-1] < allowed_kb, f"KiB more, every time: {grown}"


def thread_ranks(n, body, **options):
    """body(comm) on n threads; a list of what they returned. Raises the first rank's error."""
    results, errors = [None] * n, [None] * n
    options = {"timeout": 60, "cpu_threads": 1, **options}
    with sotto.UniqueId(cpu_threads=1) as unique_id:

        def rank_main(rank):
            try:
                mine = unique_id if rank == 0 else bytes(unique_id)
                with sotto.create_comm(rank=rank, world_size=n, unique_id=mine, **options) as comm:
                    results[rank] = body(comm)
            except BaseException as error:
                errors[rank] = error

        threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results


def sotto_run():
    """The program that starts ranks: that of the build which runs the tests, else of preset dev."""
    path = Path(os.environ.get("PYTHON_TESTS_SOTTO_RUN", ROOT / "build/dev/bin/sotto-run"))
    assert path.is_file(), f"{path} is not there: build the target sotto-run"
    return str(path)


def meeting_file():
    """Where torch's process group of the ranks of run_ranks() meets: of no other run."""
    return "file://" + os.environ["RUN_RANKS_MEETING"]


def python_of(imports=()):
    """The command for a rank's Python. imports: slow modules, besides PyTorch if that is used."""
    torch = ["torch"] if "torch" in sys.modules else []
    return warm.python(*torch, *imports) if torch or imports else sys.executable


def run_ranks(n, file, function, timeout=200, options=(), imports=()):
    """function(comm) of a test file in n processes; what they printed.

    A function without arguments gets no comm. options: more of sotto-run's; with those the ranks
    import everything themselves. imports: slow modules that they have from the start (warm.py).
    """
    words = ["-n", str(n), "--timeout", str(timeout), *options, "--"]
    python = sys.executable if options else python_of(imports)
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [
                *(sotto_run(), *words),
                *(python, str(HERE / "ranks.py"), str(file), function),
            ],
            capture_output=True,
            text=True,
            timeout=timeout + 30,
            check=False,
            env={
                **os.environ,
                "SOTTO_CPU_THREADS": "1",
                "RUN_RANKS_MEETING": os.path.join(folder, "meeting"),
            },
        )
    assert run.returncode == 0, f"exit code {run.returncode}\n{run.stdout}{run.stderr}"
    return run.stdout


def main(file, function):
    sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
    import importlib

    body = getattr(importlib.import_module(Path(file).stem), function)
    if not inspect.signature(body).parameters:
        return body()
    with sotto.init_process_group(timeout=60) as comm:
        body(comm)


if __name__ == "__main__":
    main(*sys.argv[1:])
