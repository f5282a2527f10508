"""Configurations of sotto.deepspeed: what is filled in, what the engine does, what is refused."""

import json
import math
import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import LAMB, Loss, batch, run, start  # noqa: E402

import sotto  # noqa: E402
import sotto.deepspeed as sd  # noqa: E402


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


def test_accelerates_number_of_steps_between_prints(comm):
    """It is infinite, which JSON does not have."""
    config = {"steps_per_print": math.inf, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    engine, *_ = start(comm, config)
    assert engine.steps_per_print() is None
    engine.close()


def test_auto_is_filled_in(comm):
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "OneBitAdam",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        },
        "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"},
    }
    arguments = types.SimpleNamespace(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=5e-3,
        adam_beta1=0.8,
        adam_beta2=0.9,
        adam_epsilon=1e-6,
        weight_decay=0.01,
        warmup_steps=4,
        max_steps=20,
        fp16=False,
        bf16=True,
    )
    engine, optimizer, _, schedule = start(comm, config, auto=arguments)
    assert engine.get_batch_info() == (16, 8, 2)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ([0.8, 0.9], 1e-6, 0.01)
    assert optimizer._common["gradient_clipping"] == 1.0
    assert {p.dtype for p in engine.parameters()} == {torch.bfloat16}
    assert schedule.kind == "WarmupDecayLR"
    values = sd.auto_from_training_arguments(arguments, 1)
    del values["optimizer.params.lr"]
    with pytest.raises(sotto.InvalidArgumentError, match='optimizer.params.lr: found "auto"'):
        start(comm, config, auto=values)
    with pytest.raises(sotto.InvalidArgumentError, match='found "auto"'):
        start(comm, config)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"warmup_steps": 0.1, "max_steps": 95}, 10),
        ({"warmup_steps": 0, "warmup_ratio": 0.1, "max_steps": 95}, 10),
        ({"warmup_steps": 5, "warmup_ratio": 0.1, "max_steps": 95}, 5),
        ({"warmup_steps": 5.0, "max_steps": -1}, 5),
        ({"warmup_steps": 0, "max_steps": -1}, 0),
        ({"warmup_steps": 0.1, "max_steps": -1}, "warmup_steps is 0.1"),
        ({"warmup_steps": 0, "warmup_ratio": 0.2, "max_steps": -1}, "warmup_ratio is 0.2"),
    ],
)
def test_warm_up_may_be_a_share_of_the_steps(arguments, steps, comm):
    config = {
        "optimizer": LAMB,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    }
    arguments = types.SimpleNamespace(**arguments)
    if isinstance(steps, str):
        with pytest.raises(sotto.InvalidArgumentError, match=f"{steps}.*set max_steps above 0"):
            start(comm, config, auto=arguments)
        start(comm, {"optimizer": LAMB}, auto=arguments)[0].close()
        return
    engine, *_ = start(comm, config, auto=arguments)
    assert engine.scheduler_params() == {"warmup_num_steps": steps}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"optimizer": {"type": "OneBitLamb", "params": {"freeze_stp": 4}}}, "freeze_step"),
        ({"optimizer": LAMB, "train_batch_sise": 4}, "train_batch_size"),
        ({"optimizer": LAMB, "zero_optimization": {"stage": 2}}, "stage 2 cannot be combined"),
        ({"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}, "stage 1"),
        ({"optimizer": LAMB, "pipeline": {"stages": 2}}, "pipeline.stages is 2"),
        ({"optimizer": LAMB, "tensor_parallel": {"autotp_size": 4}}, "autotp_size is 4"),
        ({"optimizer": LAMB, "train_batch_size": 3, "gradient_accumulation_steps": 2}, "equal"),
        ({"train_batch_size": 3, "zero_optimization": {"stage": 1}}, "stage 1"),
        ({"optimizer": {"type": "Adagrad", "params": {"lr_decoy": 1}}}, "lr_decoy"),
        ({"optimizer": {"type": "Muon"}}, "unknown type"),
        ({"optimizer": LAMB, "scheduler": {"type": "WarmUpLR"}}, "WarmupLR"),
        ("absent.json", "looks like the name of a file"),
        ({"csv_monitor": True}, "csv_monitor is true; an object is needed"),
        ({"csv_monitor": {"job_nam": "a"}}, "csv_monitor.job_nam is not known; allowed: enabled"),
        ({"tensorboard": {"enabled": "no"}}, 'tensorboard.enabled is "no"; allowed: true, false'),
        ({"csv_monitor": {"output_path": 3}}, "csv_monitor.output_path is 3; allowed: a string"),
        ({"comms_logger": {"prof_al": True}}, "comms_logger.prof_al is not known"),
        ({"comms_logger": {"enabled": 1}}, "comms_logger.enabled is 1; allowed: true, false"),
        ({"comet": {"samples_log_interval": True}}, "interval is true; allowed: a whole number"),
        ({"torch_autocast": {"enable": True}}, "torch_autocast.enable is not known"),
    ],
)
def test_configurations_that_are_refused(config, text, comm, monkeypatch):
    monkeypatch.setattr(sd.start, "_join", lambda *_: comm)
    with pytest.raises(sotto.SottoError, match=text):
        sd.initialize(model=Loss(), config=config)


def test_a_program_without_a_launcher_is_told_of_them(monkeypatch):
    for _, *names in sotto.launch.LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for make in (sd.init_distributed, lambda: sd.initialize(model=Loss(), config={})):
        with pytest.raises(sotto.InvalidArgumentError, match=r"no launcher .*\(torchrun\)"):
            make()


def test_the_configuration_where_command_lines_have_it(comm, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": LAMB}))
    engine, *_ = sd.initialize(
        types.SimpleNamespace(deepspeed_config=str(path)), model=Loss(), comm=comm
    )
    assert engine.config == {"optimizer": LAMB}


def test_the_forward_pass_is_cast(comm):
    engine, *_ = start(
        comm, {"optimizer": LAMB, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    )
    assert (engine.torch_autocast_enabled(), engine.torch_autocast_dtype()) == (
        True,
        torch.bfloat16,
    )
    x, y = batch(0, 0)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = engine.module(x, y)
    loss = engine(x, y)
    assert torch.equal(loss, wanted)
    assert not torch.equal(loss, engine.module(x, y))
    losses = run(engine, 0, [1] * 8)
    assert losses[-1] < losses[0]
    assert {p.dtype for p in engine.parameters()} == {torch.float32}
    engine.close()
    for dtype in ({}, {"dtype": "fp16"}):
        with pytest.raises(sotto.UnsupportedError, match="torch_autocast.dtype is"):
            start(comm, {"optimizer": LAMB, "torch_autocast": {"enabled": True, **dtype}})


@pytest.mark.parametrize("ours", [True, False])
def test_what_the_engine_does_is_not_warned_about(ours, comm, caplog):
    config = {
        "train_batch_size": 4,
        "dataloader_drop_last": True,
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "comms_logger": {"enabled": True},
        "compression_training": {"layer_reduction": {"enabled": False}},
        "optimizer": LAMB if ours else {"type": "Adagrad"},
    }
    engine, _, loader, _ = start(
        comm, config, training_data=torch.utils.data.TensorDataset(torch.ones(10))
    )
    assert len(loader) == 2
    sotto.capture_log()
    try:
        run(engine, 0, range(1))
    finally:
        sotto.capture_log(False)
        sd.comm.configure(enabled=False)
    warned = [record.getMessage().split(":")[0] for record in caplog.records]
    assert warned == ["compression_training"]
    engine.close()


# ---- sections of DeepSpeed's engine --------------------------------------------------------------

SAMPLING = {"enabled": True, "data_sampling": {"enabled": True}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"curriculum_learning": {"enabled": True}}, "curriculum_learning.enabled: true"),
        ({"data_efficiency": SAMPLING}, "data_efficiency.data_sampling.enabled: true"),
        (
            {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True}}},
            "data_efficiency.data_routing.enabled: true",
        ),
        ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop.enabled: true"),
        (
            {"compression_training": {"row_pruning": {"shared_parameters": {"enabled": True}}}},
            "compression_training.row_pruning.shared_parameters.enabled: true",
        ),
    ],
)
def test_sections_that_change_the_training_are_refused(comm, sections, words):
    with pytest.raises(sotto.UnsupportedError, match=f"{words} is not a part of this engine"):
        start(comm, {"optimizer": LAMB, **sections})


def test_sections_that_change_nothing_are_named(comm, capsys):
    names = ("elasticity", "flops_profiler", "hybrid_engine", "nebula", "quantize_training")
    sections = {name: {"enabled": True} for name in names}
    engine, *_ = start(comm, {"optimizer": LAMB, "dump_state": True, **sections})
    engine.close()
    said = capsys.readouterr().out
    for switch in ("dump_state", *(f"{name}.enabled" for name in names)):
        assert f"{switch} is true, which changes nothing in this engine" in said
    sampling = {"enabled": False, "data_sampling": {"enabled": True}}
    engine, *_ = start(
        comm,
        {
            "optimizer": LAMB,
            "data_efficiency": sampling,
            "curriculum_learning": {"enabled": False},
        },
    )
    engine.close()
    assert "changes nothing" not in capsys.readouterr().out
