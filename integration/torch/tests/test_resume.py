"""A rank is killed in the middle of a run; the run continued from its last checkpoint ends bit for
bit as one that was never stopped: parameters, optimizer, error feedback, logged losses."""

import json
import os
import signal
import subprocess

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from checkpoint import (  # noqa: E402
    CheckpointError,
    complete,
    next_slot,
    read_run,
    write_run,
)
from join import Ranks  # noqa: E402
from launched import (  # noqa: E402
    LIMIT_S,
    SMALL,
    VARIANTS,
    command,
    environment,
    processes_with,
    read_json,
    read_log,
    train,
    train_in_turn,
    train_well,
    wait_until,
    write_config,
    write_text,
)

TIMES = ("clock_s", "step_ms", "compute_ms", "codec_ms", "comm_ms")


def words_of(folder, name, out):
    variant, config = VARIANTS[name]
    return [
        *("--deepspeed_config", folder / f"{config}.json", "--variant", variant, *SMALL),
        *("--data", folder / "text", "--powersgd-start", "3", "--progress", "off"),
        *("--log-file", out / "log", "--summary", out / "summary", "--save", out / "save"),
        *("--eval-every", "100000"),
    ]


def saved_step(folder):
    try:
        slot = (folder / "latest").read_text(encoding="utf-8").strip()
        return read_json(folder / slot / "run.json")["totals"][0]["step"]
    except (OSError, ValueError):
        return 0


def sections(blob):
    """The library's state by section (core/state/blob.h), without the counter of a loss scale that
    is off, which starts anew with the process."""
    found, at = {}, 24
    for _ in range(int.from_bytes(blob[12:16], "little")):
        end = at + 4 + int.from_bytes(blob[at : at + 4], "little")
        name = blob[at + 4 : end].decode()
        at, end = end + 8, end + 8 + int.from_bytes(blob[end : end + 8], "little")
        found[name] = blob[at:end]
        at = (end + 7) // 8 * 8
    found["meta"] = json.loads(found["meta"])
    assert found["meta"].pop("loss_scale")["scale"] == 1.0
    return found


def states(folder):
    """Everything in the complete checkpoint, by file."""
    slot = folder / (folder / "latest").read_text(encoding="utf-8").strip()
    files = sorted(slot.glob("*.pt"))
    assert files
    found = {file.name: torch.load(file, weights_only=True) for file in files}
    for state in found.values():
        if state.get("optimizer"):
            kept = state["optimizer"]["sotto"]
            kept["blob"] = sections(kept["blob"].numpy().tobytes())
            assert len(kept["blob"]) > 5
    return found


def differences(a, b, where=""):
    """Paths at which two states differ, bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(dict.fromkeys([*a, *b]))
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{where}/{k}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b)) for d in differences(x, y, f"{where}/{i}")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        same = same and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [where]
    return [] if type(a) is type(b) and a == b else [where]


def losses(path):
    return [{k: v for k, v in record.items() if k not in TIMES} for record in read_log(path)]


def killed(folder, name, out):
    """Starts a run without end, kills rank 1 when there are checkpoints, and returns the step of
    the last one. No rank is left behind."""
    marker = str(out / "log")
    words = [*words_of(folder, name, out), "--save-every", "3", "--steps", "100000"]
    with subprocess.Popen(
        command(*words), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as run:
        try:
            wait_until(
                lambda: saved_step(out / "save") >= 9 or run.poll() is not None,
                "a checkpoint of step 9",
            )
            assert run.poll() is None, run.stdout.read().decode()
            ranks = [pid for pid in processes_with(marker) if rank_of(pid) == "1"]
            assert len(ranks) == 1
            os.kill(ranks[0], signal.SIGKILL)
            text = run.communicate(timeout=LIMIT_S)[0].decode()
        finally:
            run.kill()
    assert run.returncode != 0, text
    wait_until(lambda: not processes_with(marker), "the end of all ranks")
    return saved_step(out / "save")


def rank_of(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            if entry.startswith(b"SOTTO_RANK="):
                return entry.partition(b"=")[2].decode()
    return None


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "lamb-sotto"])
def test_killed_and_resumed(tmp_path, name):
    write_text(tmp_path)
    write_config(tmp_path, VARIANTS[name][1])
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    broken.mkdir()
    whole.mkdir()
    step = killed(tmp_path, name, broken)
    assert 9 <= step < 50_000
    end = ["--steps", step + 10]
    train_in_turn(
        [*words_of(tmp_path, name, broken), "--resume", broken / "save", *end],
        [*words_of(tmp_path, name, whole), *end],
    )
    assert losses(broken / "log") == losses(whole / "log")
    found, expected = states(broken / "save"), states(whole / "save")
    assert differences(found, expected) == []
    a, b = read_json(broken / "summary"), read_json(whole / "summary")
    for key in ("params_hash", "val_loss", "eval_loss", "payload_bytes_sent", "steps"):
        assert a[key] == b[key], key


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with a checkpoint of two ranks in out/save."""
    folder = tmp_path_factory.mktemp("checkpoint")
    write_text(folder)
    write_config(folder, "onebit_lamb")
    write_config(folder, "lamb")
    (folder / "out").mkdir()
    train_well(*words_of(folder, "onebit-lamb", folder / "out"), "--steps", "6")
    return folder


@pytest.mark.parametrize(
    ("more", "ranks", "text"),
    [
        ([], 1, "number of ranks was 2, now it is 1"),
        (["--width", "64"], 2, "--width was 32, now it is 64"),
    ],
)
def test_another_run_is_refused(checkpoint, tmp_path, more, ranks, text):
    words = words_of(checkpoint, "onebit-lamb", tmp_path)
    words += ["--resume", checkpoint / "out/save", "--steps", "8", *more]
    run = train(*words, ranks=ranks)
    assert run.returncode == 1, run.stdout + run.stderr
    assert text in run.stderr
    assert "Traceback" not in run.stderr
    assert not processes_with(str(tmp_path / "log"))


def test_what_differs_is_named(tmp_path):
    ranks, key = Ranks(1, 2), {"number of ranks": 2, "--variant": "sotto", "--seed": 1}
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        read_run(tmp_path, key, ranks)
    slot = next_slot(tmp_path)
    write_run(tmp_path, slot, key, [{"step": 3}, {"step": 4}])
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        read_run(tmp_path, key, ranks)
    complete(tmp_path, slot)
    assert read_run(tmp_path, key, ranks) == (slot, {"step": 4})
    assert next_slot(tmp_path) != slot
    for name, value in (("--variant", "ddp"), ("--seed", 3), ("--width", 64)):
        with pytest.raises(CheckpointError, match=f"another run: {name} was"):
            read_run(tmp_path, {**key, name: value}, ranks)
    (tmp_path / slot / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_run(tmp_path, key, ranks)
    (tmp_path / "latest").write_text("slot7", encoding="utf-8")
    with pytest.raises(CheckpointError, match="damaged"):
        read_run(tmp_path, key, ranks)


def test_a_damaged_checkpoint_is_an_error_on_every_rank(checkpoint, tmp_path):
    """Of one rank's file alone."""
    slot = (checkpoint / "out/save/latest").read_text().strip()
    copy = tmp_path / "save"
    for file in (checkpoint / "out/save").rglob("*"):
        if file.is_file():
            target = copy / file.relative_to(checkpoint / "out/save")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    broken = copy / slot / "sotto_rank_01_optim_states.pt"
    broken.write_bytes(broken.read_bytes()[:1000])
    words = words_of(checkpoint, "onebit-lamb", tmp_path)
    run = train(*words, "--resume", copy, "--steps", "8")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "failed on rank 1" in run.stderr
    assert not processes_with(str(tmp_path / "log"))
