"""The trainer in JAX trains, and comes to the C trainer's parameters on the same gradients."""

import sys
from pathlib import Path

import pytest
import warm
from ranks import HERE, ROOT, sotto_run

pytest.importorskip("jax", reason="jax is not installed")
sys.path.append(str(ROOT / "bindings/tests"))
import recorded

RANKS = 4
TRAINER = str(ROOT / "integration/jax/trainer.py")


@pytest.fixture
def built(monkeypatch):
    """The programs of the build, as bindings/tests/recorded.py looks for them."""
    programs = Path(sotto_run())
    for name, path in (
        ("BINDINGS_SOTTO_RUN", programs),
        ("BINDINGS_C_TRAINER", programs.with_name("sotto-c-trainer")),
        ("BINDINGS_RECORDER", programs.parents[1] / "lib/libsotto-gradient-recorder.so"),
    ):
        if not path.is_file():
            pytest.skip(f"{path} is not there: this build does not make it")
        monkeypatch.setenv(name, str(path))
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent / "src"))


def test_the_trainer_reaches_the_compressed_stage(built):
    said = recorded.launched(
        RANKS, warm.python("jax"), TRAINER, ROOT / "integration/configs/onebit_lamb.json"
    )
    assert "900 steps, stage 1" in said, said


def test_the_trainer_has_the_parameters_of_the_c_trainer(built, tmp_path):
    recorded.same_as_c_trainer(RANKS, tmp_path, warm.python("jax"), TRAINER)
