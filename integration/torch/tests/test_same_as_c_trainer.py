"""The task is that of integration/c_trainer: same text, tokens, masks, batches, model and start."""

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed in this Python")

from launched import SMALL, read_json, read_log, train, train_well, write_config, write_text
from ranks import sotto_run

C_TRAINER = Path(sotto_run()).with_name("sotto-c-trainer")
SAME = ("steps", "ranks", "parameters", "samples_per_step", "held_out_sequences", "seed")


def both(folder, config, *words):
    """(log, summary) of the C trainer and of this one, on two ranks."""
    results = []
    for name, option, log_option, more in (
        ("c", "--config", "--log", {"program": (C_TRAINER,)}),
        ("torch", "--deepspeed_config", "--log-file", {}),
    ):
        log, summary = folder / f"{name}.jsonl", folder / f"{name}.summary"
        outputs = (log_option, log, "--summary", summary, "--progress", "off")
        train_well(option, config, *outputs, *words, **more)
        results.append((read_log(log), read_json(summary)))
    return results


def test_start_and_batches_are_the_same_to_rounding(tmp_path):
    """The first two updates have a learning rate of 0: losses are those of the start, on other
    batches each, and the parameters at the end are those of the start, bit for bit."""
    text, config = write_text(tmp_path), write_config(tmp_path, "lamb")
    (c_log, c), (log, mine) = both(
        tmp_path, config, *SMALL, "--data", text, "--seed", "7", "--steps", "2"
    )
    assert mine["params_hash"] == c["params_hash"]
    for key in SAME:
        assert mine[key] == c[key], key
    assert [record["step"] for record in log] == [record["step"] for record in c_log] == [1, 2, 2]
    for a, b in zip(log, c_log):
        key = "eval_loss" if "eval_loss" in a else "loss"
        assert a[key] == pytest.approx(b[key], rel=2e-6)
        assert a["samples"] == b["samples"]
    assert log[0]["loss"] != pytest.approx(log[1]["loss"], rel=1e-4)
    assert log[0]["grad_norm"] == pytest.approx(c_log[0]["grad_norm"], rel=1e-4)
    for key in ("val_loss", "eval_loss", "unigram_entropy"):
        assert mine[key] == pytest.approx(c[key], rel=2e-6), key


def test_the_default_text_is_the_same(tmp_path):
    """Without --data both take the Python library of this machine."""
    if not list(Path("/usr/lib").glob("python3.*/os.py")):
        pytest.skip("this machine has no Python library in /usr/lib")
    config = write_config(tmp_path, "lamb")
    (c_log, c), (log, mine) = both(tmp_path, config, "--steps", "1")
    assert mine["params_hash"] == c["params_hash"]
    assert mine["parameters"] > 150_000
    assert log[0]["loss"] == pytest.approx(c_log[0]["loss"], rel=2e-6)
    assert mine["eval_loss"] == pytest.approx(c["eval_loss"], rel=2e-6)


@pytest.mark.parametrize("name", ["lamb", "onebit_lamb"])
def test_the_run_goes_on_alike(tmp_path, name):
    """Rounding grows with the steps, in 1 bit faster; what is sent is equal to the byte."""
    text, config = write_text(tmp_path), write_config(tmp_path, name)
    (c_log, c), (log, mine) = both(
        tmp_path, config, *SMALL, "--data", text, "--steps", "12", "--eval-every", "6"
    )
    assert len(log) == len(c_log) == 14
    for a, b in zip(log, c_log):
        key = "eval_loss" if "eval_loss" in a else "loss"
        assert a[key] == pytest.approx(b[key], rel=2e-3)
        for same in ("step", "samples", "stage", "payload_bytes", "loss_scale"):
            assert a.get(same) == b.get(same)
        if "lr" in a:
            assert a["lr"] == pytest.approx(b["lr"], rel=1e-6)
    assert {a["stage"] for a in log if "stage" in a} == (
        {"full precision"} if name == "lamb" else {"full precision", "compressed"}
    )
    for key in ("payload_bytes_sent", "payload_bytes_planned"):
        assert mine[key] == c[key], key
    assert set(mine) >= set(c) - {"blas_kernels", "payload_bytes_between_hosts"}


@pytest.mark.parametrize("name", ["local_sgd", "co2_lamb"])
def test_outer_steps_are_evaluated_and_end_alike(tmp_path, name):
    """An evaluation is of the anchor, and the end of a training averages what was not averaged: a
    rank's own parameters have other losses. A run that is resumed goes on with averages under way,
    and also where it had ended."""
    text, config = write_text(tmp_path), write_config(tmp_path, name)
    words = (*SMALL, "--data", text, "--eval-every", "5")
    (c_log, c), (log, mine) = both(tmp_path, config, *words, "--steps", "14")
    assert len(log) == len(c_log) == 17
    for a, b in zip(log, c_log):
        key = "eval_loss" if "eval_loss" in a else "loss"
        assert a[key] == pytest.approx(b[key], rel=2e-5)
        assert a.get("stage") == b.get("stage")
    assert {a["stage"] for a in log if "stage" in a} == {"local", "outer"}
    for key in ("val_loss", "eval_loss"):
        assert mine[key] == pytest.approx(c[key], rel=2e-5), key
    for key in ("payload_bytes_sent", "payload_bytes_planned"):
        assert mine[key] == c[key], key
    assert mine["payload_bytes_sent"] == mine["payload_bytes_planned"]
    summary, save = tmp_path / "resumed", tmp_path / "save"
    outputs = ("--deepspeed_config", config, "--summary", summary, "--save", save)
    train_well(*outputs, *words, "--steps", "7")
    for _ in range(2):
        train_well(*outputs, *words, "--steps", "14", "--resume", save)
        resumed = read_json(summary)
        assert resumed["params_hash"] == mine["params_hash"]
        assert resumed["wall_s"] < 60


def test_ddp_refuses_outer_steps(tmp_path):
    """Its LAMB averages gradients in every step."""
    text, config = write_text(tmp_path), write_config(tmp_path, "local_sgd")
    run = train("--deepspeed_config", config, "--variant", "ddp", *SMALL, "--data", text)
    assert run.returncode == 1
    assert "--variant ddp.. have no sotto.outer" in run.stderr
