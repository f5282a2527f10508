"""A Python that has imported slow modules already, for tests that start many processes.

Importing PyTorch takes 1.3 s of a processor, DeepSpeed 4 s. What python() returns stands in a
command for sys.executable: `warm.python("torch") program.py ARGUMENTS`. The program runs in a fork
of a process that has the modules; everything else is as from an interpreter of its own: arguments,
environment, folder, standard files, signals, exit code, command line in /proc. sotto.torch and the
library are imported by the program itself.

Not for programs in another network namespace, and not for what an interpreter reads when it starts
(options other than -B and -u, PYTHONHASHSEED, OMP_NUM_THREADS, which is 1). The hashes of strings
are the same in all forks, so that sets have the same order.
"""

import atexit
import functools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT_S = 300
TITLE_BYTES = 16_000
# As the programs of tests have it; what modules read when they are imported.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # forks can use CUDA only if this process has not
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Imported with a module, as its users come to need it: with the first optimizer for instance.
MORE = {"torch": ("torch._dynamo", "torch.distributed.launcher.api", "pytest")}


@functools.cache
def python(*modules, interpreter=sys.executable):
    """The path of a program that stands for an interpreter with these modules; made once.

    bindings/run_pytest.py has one with torch already, which further ones are forks of.
    """
    first = os.environ.get("WARM_PYTHON")
    if first and modules == ("torch",):
        return first
    folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
    names = [more for name in modules for more in (name, *MORE.get(name, ()))]
    out = (folder / "output").open("w+b")
    environment = {k: v for k, v in {**os.environ, **ENVIRONMENT}.items() if k != "PYTHONPATH"}
    server = subprocess.Popen(
        [
            first or interpreter,
            "-B",
            str(HERE / "warm_server.py"),
            str(folder),
            "-" * TITLE_BYTES,
            *names,
        ],
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=out,
        env=environment,
    )
    atexit.register(end, server, folder)
    limit = time.monotonic() + LIMIT_S
    while not (folder / "ready").exists():
        text = (folder / "output").read_text(encoding="utf-8", errors="replace")
        assert server.poll() is None, f"importing {', '.join(names)} failed\n{text}"
        assert time.monotonic() < limit, f"importing {', '.join(names)}: not in {LIMIT_S} s\n{text}"
        time.sleep(0.02)
    program = folder / "python"
    client = HERE / "warm_client.py"
    words = shlex.join([interpreter, "-ISB", str(client), str(folder)])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    program.chmod(0o700)
    return str(program)


def end(server, folder):
    """The server ends its programs when its standard input ends."""
    server.stdin.close()
    server.wait(LIMIT_S)
    shutil.rmtree(folder, ignore_errors=True)  # where the server had not begun
