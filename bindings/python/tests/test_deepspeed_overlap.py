"""sotto.deepspeed with "sotto": {"overlap"}: backward() sends, and begins the step."""

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import LAMB, batch, parameters, start  # noqa: E402

import sotto  # noqa: E402

ADAM = {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 3}}
CONFIGS = {
    "lamb": {"optimizer": LAMB, "gradient_clipping": 0.25},
    "accumulates": {"optimizer": LAMB, "gradient_accumulation_steps": 3},
    "bf16": {"optimizer": ADAM, "bf16": {"enabled": True}},
    "fp16": {"optimizer": ADAM, "fp16": {"enabled": True, "initial_scale_power": 4}},
    "buckets": {
        "optimizer": ADAM,
        "sotto": {"granularity": "bucket", "bucket_elements": 8192},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02}},
    },
}


def trained(comm, config, overlapped):
    config = {"train_micro_batch_size_per_gpu": 16, **config}
    if overlapped:
        overlap = {"unused": "zero", "order": "observed"}
        config["sotto"] = {**config.get("sotto", {}), "overlap": overlap}
    engine, *_ = start(comm, config)
    for step in range(12):
        x, y = batch(comm.rank, step)
        dtype = next(engine.module.parameters()).dtype
        loss = engine(x.to(dtype), y.to(dtype))
        if step % 2:
            engine.backward(loss)
        else:
            engine.scale(loss).backward()
        engine.step()
    figures = (engine.global_steps, engine.skipped_steps, engine.get_lr(), engine.cur_scale)
    rounds = engine._overlap.info().rounds if overlapped else None
    values = [p.clone() for p in parameters(engine)]
    engine.close()
    return values, figures, rounds


@pytest.mark.parametrize("name", CONFIGS)
def test_training_has_the_same_bits(name):
    def body(comm):
        values, figures, _ = trained(comm, CONFIGS[name], False)
        same, others, rounds = trained(comm, CONFIGS[name], True)
        assert all(map(torch.equal, values, same))
        assert figures == others
        assert rounds == figures[0]

    thread_ranks(2, body)


def test_the_programs_own_optimizer_is_refused():
    def body(comm):
        net = torch.nn.Linear(3, 1)
        with pytest.raises(sotto.UnsupportedError, match="describe the optimizer in the config"):
            sotto.deepspeed.initialize(
                model=net,
                optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
                config={"train_batch_size": 1, "sotto": {"overlap": {}}},
                comm=comm,
            )

    thread_ranks(1, body)


def test_outer_steps_and_overlap_exclude_each_other():
    config = {"optimizer": LAMB, "sotto": {"overlap": {}, "outer": {"preset": "co2"}}}
    with pytest.raises(sotto.InvalidArgumentError, match=r"sotto.overlap: found together with"):
        sotto.config_report(config)
