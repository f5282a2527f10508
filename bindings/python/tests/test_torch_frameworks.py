"""Save, resume and go on under Trainer, Accelerate, Lightning, Fabric and torchrun's restarts."""

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
import warm

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "framework_programs.py"
NEEDS = {
    "trainer": ("transformers", "accelerate"),
    "accelerate": ("accelerate",),
    "lightning": ("lightning",),
    "fabric": ("lightning",),
    "restarts": (),
}
# What the frameworks import when they are used, as far as it is installed.
MODULES = [
    name
    for name in ("accelerate", "transformers.trainer", "lightning")
    if importlib.util.find_spec(name.partition(".")[0])
]
EXACT = ("AdamW", "Outer")  # keep no error feedback
KINDS = ("AdamW", "OnebitAdam", "ZeroOneAdam", "Outer")
LIMIT_S = 600


def skip_without(framework):
    missing = [name for name in NEEDS[framework] if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed in this Python")


def launch(framework, what, directory, *options):
    """Two ranks by torchrun; free ports, no network."""
    python = warm.python("torch", *MODULES)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "SOTTO_CPU_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHON_EXEC": python,  # of torchrun's ranks
    }
    words = ["--standalone", "--nproc-per-node", "2", *options, str(PROGRAMS), framework, what]
    command = [python, "-m", "torch.distributed.run", *words, str(directory), *KINDS]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            text = run.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun ends its ranks
            pytest.fail(f"no end after {LIMIT_S} s\n{run.communicate(timeout=100)[0]}")
    assert run.returncode == 0, text


def records(directory, kind, what):
    return [
        torch.load(directory / kind / f"{what}.rank{rank}.pt", weights_only=True) for rank in (0, 1)
    ]


def equal(a, b):
    return all(map(torch.equal, a["params"], b["params"]))


@pytest.mark.parametrize("framework", [name for name in NEEDS if name != "restarts"])
def test_saved_and_resumed(framework, tmp_path):
    """Rank 0 alone makes the checkpoint, and all ranks load it.

    Without error feedback the resumed run is the uninterrupted one, bit for bit. With it the ranks
    other than 0 start theirs at zero, and say so: the parameters are the checkpoint's, so the first
    loss is that of the uninterrupted run, later ones are close to it. Outer is saved at a boundary,
    where all ranks have the same parameters.
    """
    skip_without(framework)
    launch(framework, "whole", tmp_path)
    launch(framework, "resumed", tmp_path)
    for kind in KINDS:
        whole, resumed = (records(tmp_path, kind, what) for what in ("whole", "resumed"))
        for before, after in zip(whole, resumed):
            assert len(before["losses"]) == 12
            assert len(after["losses"]) == 6
            assert not before["warnings"]
            if kind in EXACT:
                assert after["losses"] == before["losses"][6:], kind
                assert equal(before, after), kind
            else:
                mean = sum(before["losses"][6:]) / 6
                assert sum(after["losses"]) / 6 == pytest.approx(mean, rel=0.5), kind
        if kind != "ZeroOneAdam":  # whose ranks differ between synchronisations
            first = [after["losses"][0] for after in resumed]
            assert first == [before["losses"][6] for before in whole]
            assert equal(*whole), kind
            assert equal(*resumed), kind
        told = [bool(after["warnings"]) for after in resumed]
        assert told == [False, kind != "AdamW"], resumed
        if told[1]:
            assert "made by rank 0 of 2, and this is rank 1 of 2" in resumed[1]["warnings"][0]


def test_a_rank_that_ends_and_is_started_again(tmp_path):
    """Every rank saves its own state: torchrun's restart goes on bit for bit."""
    launch("restarts", "whole", tmp_path)
    launch("restarts", "killed", tmp_path, "--max-restarts", str(len(KINDS)))
    for kind in KINDS:
        whole, killed = (records(tmp_path, kind, what) for what in ("whole", "killed"))
        for rank in (0, 1):
            assert (tmp_path / kind / f"killed.restarted.rank{rank}").read_text() == "6"
            assert whole[rank]["losses"] == killed[rank]["losses"], kind
            assert equal(whole[rank], killed[rank]), kind
            assert not killed[rank]["warnings"]
