"""What load_checkpoint() takes of a checkpoint, and what of the engine then goes on."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import LAMB, batch, parameters, run, start  # noqa: E402

import sotto  # noqa: E402


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


SCHEDULES = {
    "WarmupLR": {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.1,
        "warmup_num_steps": 10,
        "warmup_type": "linear",
    },
    "OneCycle": {
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "cycle_first_step_size": 5,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_lr_rate": 0.1,
    },
    "WarmupCosineLR": {"total_num_steps": 30, "warmup_num_steps": 4},
}
# As DeepSpeed 0.18.9 has them behind 6 steps: (load_optimizer_states, load_lr_scheduler_states).
RATES = {
    ("WarmupLR", True, True): [0.05, 0.06, 0.07, 0.08],
    ("WarmupLR", True, False): [0.05, 0.0, 0.01, 0.02],
    ("WarmupLR", False, True): [0.0, 0.06, 0.07, 0.08],
    ("WarmupLR", False, False): [0.0, 0.0, 0.01, 0.02],
    ("OneCycle", True, True): [0.082, 0.064, 0.046, 0.028],
    ("OneCycle", True, False): [0.082, 0.028, 0.046, 0.064],
    ("OneCycle", False, True): [0.01, 0.064, 0.046, 0.028],
    ("OneCycle", False, False): [0.01, 0.028, 0.046, 0.064],
    ("WarmupCosineLR", True, True): [0.09855, 0.09675, 0.09427, 0.09115],
    ("WarmupCosineLR", True, False): [0.09855, 0.0, 0.05, 0.07925],
    ("WarmupCosineLR", False, True): [0.0, 0.09675, 0.09427, 0.09115],
    ("WarmupCosineLR", False, False): [0.0, 0.0, 0.05, 0.07925],
}
BETAS = {  # of OneCycle
    (True, True): [0.82, 0.84, 0.86, 0.88],
    (True, False): [0.82, 0.88, 0.86, 0.84],
    (False, True): [0.8, 0.84, 0.86, 0.88],
    (False, False): [0.8, 0.88, 0.86, 0.84],
}


def saved_behind_6_steps(comm, kind, folder):
    """The configuration of an engine with this schedule, which has saved a checkpoint."""
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": kind, "params": SCHEDULES[kind]},
    }
    engine, *_ = start(comm, config)
    run(engine, 0, range(6))
    engine.save_checkpoint(folder)
    engine.close()
    return config


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_schedule_may_start_again_or_go_on_alone(kind, tmp_path, comm):
    config = saved_behind_6_steps(comm, kind, tmp_path)
    for flags in ((True, True), (True, False), (False, True), (False, False)):
        resumed, optimizer, _, schedule = start(comm, config)
        resumed.load_checkpoint(
            tmp_path, load_optimizer_states=flags[0], load_lr_scheduler_states=flags[1]
        )
        rates, betas = [], []
        for step in range(4):
            rates.append(resumed.get_lr()[0])
            betas.append(optimizer.report("groups")["groups"][0]["betas"][0])
            run(resumed, 0, [step])
            assert resumed.get_mom()[0] == optimizer.report("groups")["groups"][0]["betas"]
        assert rates == pytest.approx(RATES[(kind, *flags)], abs=6e-6)
        if kind == "OneCycle":
            assert betas == pytest.approx(BETAS[flags])
        done = 3 + 6 * flags[1]
        assert schedule.state_dict() == {"last_batch_iteration": done}
        resumed.close()


# The same of WarmupLR in an engine that has made 2 steps.
BEHIND_2_STEPS = {
    (True, True): [0.05, 0.06, 0.07, 0.08],
    (True, False): [0.05, 0.02, 0.03, 0.04],
    (False, True): [0.01, 0.06, 0.07, 0.08],
    (False, False): [0.01, 0.02, 0.03, 0.04],
}


@pytest.mark.parametrize("flags", BEHIND_2_STEPS)
def test_a_schedule_that_is_not_loaded_goes_on(flags, tmp_path, comm):
    config = saved_behind_6_steps(comm, "WarmupLR", tmp_path)
    other, *_ = start(comm, config)
    run(other, 0, range(2))
    other.load_checkpoint(
        tmp_path, load_optimizer_states=flags[0], load_lr_scheduler_states=flags[1]
    )
    rates = []
    for step in range(4):
        rates += other.get_lr()
        run(other, 0, [step])
    assert rates == pytest.approx(BEHIND_2_STEPS[flags], abs=6e-6)
    other.close()


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_state_is_loaded_while_the_schedule_goes_on(kind, tmp_path, comm):
    """Rates and betas are those behind the state, whatever the engine's were before."""
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": kind, "params": SCHEDULES[kind]},
    }
    engine, optimizer, _, _ = start(comm, config)
    run(engine, 0, range(6))
    engine.save_checkpoint(tmp_path)
    figures = []
    for rate in (None, 0.5, None):
        seen = []
        for step in range(4):
            run(engine, 0, [step])
            seen.append(optimizer.report("groups")["groups"])
        figures.append((seen, parameters(engine)))
        if rate is not None:
            engine.set_lr(rate)
            run(engine, 0, [9])
        engine.load_checkpoint(tmp_path)
    for seen, values in figures[1:]:
        assert seen == figures[0][0]
        assert all(torch.equal(p, q) for p, q in zip(values, figures[0][1]))
    engine.close()


@pytest.mark.parametrize("before", [0, 1], ids=["at the start", "behind a step"])
def test_a_schedule_goes_on_from_the_rate_of_its_own_file(before, tmp_path, comm):
    def config(lr):
        return {
            "train_batch_size": 16,
            "optimizer": {"type": "AdamW", "params": {"lr": lr}},
            "scheduler": {"type": "WarmupCosineLR", "params": SCHEDULES["WarmupCosineLR"]},
        }

    engine, _, _, _ = start(comm, config(0.1))
    run(engine, 0, range(6))
    engine.save_checkpoint(tmp_path)
    rate = engine.get_lr()[0]
    engine.close()
    other, _, _, _ = start(comm, config(0.2))
    run(other, 0, range(before))
    other.load_checkpoint(tmp_path)
    assert other.get_lr() == [pytest.approx(2 * rate)]
    other.close()


def test_an_overflow_holds_the_rate_of_a_schedule_that_starts_again(tmp_path, comm):
    config = {
        "train_batch_size": 16,
        "fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": SCHEDULES["WarmupLR"]},
    }
    engine, _, _, _ = start(comm, config)
    run(engine, 0, range(6), torch.float16)
    engine.save_checkpoint(tmp_path)
    engine.close()
    engine, _, _, _ = start(comm, config)
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert (engine.optimizer.cur_scale, engine.optimizer.overflow) == (engine.cur_scale, False)
    for p in engine.module.parameters():
        p.grad = torch.full_like(p, float("inf"))
    engine.step()
    assert engine.skipped_steps == 1
    assert engine.get_lr() == [pytest.approx(0.05)]
    run(engine, 0, [0], torch.float16)
    assert engine.get_lr() == [0.0]
    engine.close()


def test_only_the_module_is_loaded(comm, tmp_path):
    engine, *_ = start(comm, {"optimizer": LAMB})
    run(engine, 0, range(6))
    engine.save_checkpoint(tmp_path)
    engine.save_16bit_model(tmp_path)
    other, *_ = start(comm, {"optimizer": LAMB})
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert all(torch.equal(p, q) for p, q in zip(parameters(engine), parameters(other)))
    assert (other.global_steps, other.optimizer.info().step) == (0, 0)
    weights = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert torch.equal(weights["net.0.weight"], engine.net[0].weight)
    engine.close()
    other.close()


HALF = {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}}
ZERO_ONE = {"type": "ZeroOneAdam", "params": {"lr": 0.01, "var_freeze_step": 2}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01}}
KEPT = {
    "lamb": ({"optimizer": LAMB}, None),
    "half": ({"optimizer": ADAMW, **HALF}, None),
    "zero one": ({"optimizer": {"type": "ZeroOneAdam", "params": {"lr": 0.01}}}, None),
    "a client": (HALF, torch.optim.AdamW),
    "accumulates": ({"optimizer": ADAMW, "gradient_accumulation_steps": 2}, None),
}


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("only", ["load_module_only", "load_optimizer_states"])
def test_the_optimizer_goes_on_with_a_module_that_is_loaded(only, kind, comm, tmp_path):
    """Moments, step number, schedule and loss scale are the engine's own, as in DeepSpeed."""
    config, client = KEPT[kind]
    config = {"train_micro_batch_size_per_gpu": 16, **config}
    dtype = torch.float16 if "fp16" in config else torch.float32
    engine, *_ = start(comm, config, optimizer=client)
    run(engine, 0, range(4), dtype)
    engine.save_checkpoint(tmp_path)
    seen = []
    for loads in (True, False):
        other, *_ = start(comm, config, optimizer=client)
        run(other, 0, range(2), dtype)
        if loads:
            x, y = batch(0, 5)
            if kind == "accumulates":  # a micro-batch that is dropped
                other.backward(other(x, y))
                other.step()
            other.load_checkpoint(tmp_path, **{only: only == "load_module_only"})
        else:
            other.module.load_state_dict(engine.module.state_dict())
            if client:
                other.optimizer.refresh_fp32_params()
        losses = run(other, 0, range(2, 8), dtype)
        assert other.optimizer.cur_scale == other.cur_scale
        seen.append((losses, other.cur_scale, other.optimizer.info().step, parameters(other)))
        other.close()
    engine.close()
    assert seen[0][:3] == seen[1][:3]
    assert all(torch.equal(p, q) for p, q in zip(seen[0][3], seen[1][3]))


@pytest.mark.parametrize(
    ("optimizer", "sotto"), [(ZERO_ONE, {}), (ADAMW, {"outer": {"preset": "diloco", "period": 2}})]
)
def test_what_cannot_go_on_with_other_parameters_starts_anew(optimizer, sotto, comm, tmp_path):
    config = {
        "train_batch_size": 16,
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupLR", "params": SCHEDULES["WarmupLR"]},
        "sotto": sotto,
    }
    engine, *_ = start(comm, config)
    run(engine, 0, range(4))
    engine.save_checkpoint(tmp_path)
    saved = parameters(engine)
    run(engine, 0, range(2))
    rate = engine.get_lr()
    engine.load_checkpoint(tmp_path, load_module_only=True)
    assert (engine.global_steps, engine.optimizer.info().step) == (6, 0)
    assert all(torch.equal(p, q) for p, q in zip(saved, parameters(engine)))
    assert engine.get_lr() == rate == [pytest.approx(0.05)]
    run(engine, 0, [0])
    assert engine.get_lr() == [pytest.approx(0.06)]
    engine.close()
