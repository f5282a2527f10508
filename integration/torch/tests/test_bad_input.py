"""What users get wrong: a clear line, exit code 1 or 2, no rank left behind."""

import json

import pytest

pytest.importorskip("torch", reason="torch is not installed in this Python")

from bert import Bert, ModelShape
from data import Data, DataError
from join import Ranks
from lab import LabError, interface_bytes
from lamb import ConfigError
from launched import SMALL, processes_with, train, write_config, write_text
from options import parse
from variants import Configuration, DdpPowerSgd

import sotto


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def refused(folder, text, *words):
    """Standard error of a run of two ranks that must fail."""
    marker = folder / "log"
    run = train(
        *("--data", text, *SMALL, "--steps", 3, "--log-file", marker, "--progress", "off", *words)
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "Traceback" not in run.stderr, run.stderr
    assert not processes_with(str(marker))
    return run.stderr


def test_a_missing_configuration(tmp_path, text):
    said = refused(tmp_path, text, "--deepspeed_config", tmp_path / "none.json")
    assert "none.json" in said
    assert "No such file" in said


@pytest.mark.parametrize("variant", ["sotto", "ddp"])
def test_a_misspelt_key(tmp_path, text, variant):
    path = write_config(tmp_path, "lamb", gradient_cliping=1.0)
    said = refused(tmp_path, text, "--deepspeed_config", path, "--variant", variant)
    assert "gradient_cliping" in said
    assert "gradient_clipping" in said


def test_a_summary_that_cannot_be_written_is_told_before_the_training(tmp_path, text):
    summary = tmp_path / "none" / "summary"
    config = write_config(tmp_path, "lamb")
    said = refused(tmp_path, text, "--deepspeed_config", config, "--summary", summary)
    assert str(summary) in said
    assert not (tmp_path / "log").exists()


def test_no_json(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('{"optimizer": ')
    with pytest.raises(sotto.InvalidArgumentError, match="line 1"):
        Configuration(str(path), 4)


def test_ranks_that_do_not_fit_the_batch(tmp_path, text):
    config = json.loads(write_config(tmp_path, "lamb").read_text())
    path = write_config(tmp_path, "lamb", train_batch_size=18)
    assert config["train_micro_batch_size_per_gpu"] == 6
    said = refused(tmp_path, text, "--deepspeed_config", path)
    assert "train_batch_size" in said
    assert "18" in said


def test_an_optimizer_that_ddp_cannot_have(tmp_path):
    configuration = Configuration(str(write_config(tmp_path, "onebit_lamb")), 2)
    with pytest.raises(ConfigError, match="optimizer.type is OneBitLamb"):
        DdpPowerSgd(Bert(ModelShape(9, 8, 1, 2, 8, 4), 1), configuration, Ranks(0, 2), None)


def test_data(tmp_path):
    short = tmp_path / "short"
    short.write_text("too little")
    for given, expected in (
        (tmp_path / "nothing", "cannot read"),
        (short, "at least 2000000 bytes"),
        (tmp_path, "no .py file"),
    ):
        with pytest.raises(DataError, match=expected):
            Data([str(given)])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--heads", "3"], "not a multiple of --heads 3"),
        (["--masked", "65"], "more than --positions"),
        (["--save-every", "5"], "--save-every needs --save"),
        (["--steps", "-1"], "--steps"),
        (["--step", "4"], "unrecognized arguments"),
        (["--variant", "magic"], "invalid choice"),
    ],
)
def test_the_command_line(capsys, words, text):
    with pytest.raises(SystemExit) as ended:
        parse(["--deepspeed_config", "some.json", *words])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_a_network_interface_that_is_not_there():
    with pytest.raises(LabError, match="no interface none7"):
        interface_bytes("self", "none7")
    assert interface_bytes("self", "lo") >= 0
