"""Runs a program on several ranks with DeepSpeed, or with one changed line on sotto.deepspeed."""

import contextlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import warm

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE.parent / "programs"
# What `import deepspeed` becomes. The first also serves `from deepspeed.x import y`.
INSTALLED = "import sotto.deepspeed as deepspeed; deepspeed.install_as_deepspeed()"
IMPORTED = "import sotto.deepspeed as deepspeed"
BEGINS = "-- the next program begins --"


def changed(program, folder, line):
    """The program with that one line changed."""
    source = (PROGRAMS / program).read_text(encoding="utf-8")
    text, n = re.subn(r"^import deepspeed$", line, source, flags=re.M)
    assert n == 1, program
    differs = [a for a, b in zip(source.splitlines(), text.splitlines()) if a != b]
    assert differs == ["import deepspeed"]
    path = folder / program
    path.write_text(text, encoding="utf-8")
    return path


def by_path(program, folder):
    """The program with DeepSpeed's name replaced in every import."""
    source = (PROGRAMS / program).read_text(encoding="utf-8")
    text = re.sub(r"^(import|from) deepspeed\b", r"\1 sotto.deepspeed", source, flags=re.M)
    text = text.replace("import sotto.deepspeed\n", IMPORTED + "\n")
    path = folder / program
    path.write_text(text, encoding="utf-8")
    return path


@contextlib.contextmanager
def reserved_port():
    """A port of 127.0.0.1 for rank 0: bound here, so that no other process is given it, but not
    listened at, so that a listener with SO_REUSEADDR can have it."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def environment(rank, ranks, port):
    """As torchrun sets it."""
    return {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "SOTTO_CPU_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def rows_of(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run(*commands, kind="sotto", ranks=2, timeout=600):
    """The rows that rank 0 prints as JSON, for every command: a program and its arguments.

    The programs run one after another in the same processes, with one process group of torch.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    words = json.dumps([[str(word) for word in command] for command in commands])
    python = warm.python("torch", *(["deepspeed"] if kind == "deepspeed" else []))
    with reserved_port() as port:
        started = [
            subprocess.Popen(
                [python, __file__, kind, words], env=environment(r, ranks, port), **options
            )
            for r in range(ranks)
        ]
        try:
            outputs = [process.communicate(timeout=timeout)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    for rank, (process, text) in enumerate(zip(started, outputs)):
        assert process.returncode == 0, f"rank {rank}: exit code {process.returncode}\n{text}"
    parts = [rows_of(text) for text in outputs[0].split(BEGINS)[1:]]
    assert len(parts) == len(commands), outputs[0]
    return parts


def with_deepspeed(*commands):
    """As run(), of programs as they stand: each is a name and arguments."""
    return run(*([PROGRAMS / name, *more] for name, *more in commands), kind="deepspeed")


def prepare_deepspeed():
    """DeepSpeed without compiling its collectives, and without the rehearsal of its wrapper.

    The wrapper of 16-bit parameters makes a step with zero gradients in its constructor, which
    counts in the bias correction of Adam: losses differ by 5 % from that alone.
    """
    import deepspeed
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    FP16_UnfusedOptimizer.initialize_optimizer_states = lambda self: None


def main(kind, commands):
    if kind == "deepspeed":
        prepare_deepspeed()
    for words in json.loads(commands):
        print(BEGINS, flush=True)
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
