"""Ranks for tests: threads of this process, or processes started by sotto-run."""

import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

import sotto

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def resident_kb():
    """KiB of memory that this process has resident."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def thread_ranks(n, body, **options):
    """body(comm) on n threads; a list of what they returned. Raises the first rank's error."""
    results, errors = [None] * n, [None] * n
    with sotto.UniqueId(cpu_threads=1) as unique_id:

        def rank_main(rank):
            try:
                mine = unique_id if rank == 0 else bytes(unique_id)
                with sotto.create_comm(
                    rank=rank, world_size=n, unique_id=mine, timeout=20, cpu_threads=1, **options
                ) as comm:
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


def run_ranks(n, file, function, timeout=100, options=()):
    """function(comm) of a test file in n processes; what they printed.

    A function without arguments gets no comm. options: more of sotto-run's.
    """
    run = subprocess.run(
        [
            sotto_run(),
            "-n",
            str(n),
            "--timeout",
            str(timeout),
            *options,
            "--",
            sys.executable,
            str(HERE / "ranks.py"),
            str(file),
            function,
        ],
        capture_output=True,
        text=True,
        timeout=timeout + 30,
        check=False,
        env={**os.environ, "SOTTO_CPU_THREADS": "1"},
    )
    assert run.returncode == 0, f"exit code {run.returncode}\n{run.stdout}{run.stderr}"
    return run.stdout


def main(file, function):
    sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
    import importlib

    body = getattr(importlib.import_module(Path(file).stem), function)
    if not inspect.signature(body).parameters:
        return body()
    with sotto.init_process_group(timeout=30) as comm:
        body(comm)


if __name__ == "__main__":
    main(*sys.argv[1:])
