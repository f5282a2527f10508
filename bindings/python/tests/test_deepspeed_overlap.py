"""sotto.deepspeed with "sotto": {"overlap"}: backward() sends, and begins the step."""

import copy

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


class Heads(torch.nn.Module):
    """A rank has one of two tasks; the last head is nobody's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.body = torch.nn.Linear(20, 4)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, 1) for _ in range(3))

    def forward(self, x, task):
        return self.heads[task](torch.tanh(self.body(x))).square().mean()


HEADS = Heads()  # ranks are threads: they share torch's random numbers


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_a_rank_may_use_a_part_of_the_model(frozen):
    """With "overlap": {} alone, as without: its gradient counts as zeros."""

    def body(comm):
        results = []
        for overlap in (None, {}):
            net = copy.deepcopy(HEADS)
            section = {"overlap": overlap} if overlap is not None else {}
            engine, *_ = start(comm, {"optimizer": ADAM, "sotto": section}, net)
            for step in range(8):
                if frozen and step in (3, 5):
                    net.body.bias.requires_grad_(step == 5)
                engine.backward(engine(batch(comm.rank, step)[0], (step + comm.rank) % 2))
                engine.step()
            results.append([p.clone() for p in parameters(engine)])
            engine.close()
        assert all(map(torch.equal, *results))

    thread_ranks(2, body)


def test_engines_behind_each_other():
    """A generator's backward() goes through the discriminator, whose step it does not begin."""

    def body(comm):
        results = []
        for section in ({}, {"overlap": {}}):
            config = {"optimizer": ADAM, "sotto": section}
            generator, *_ = start(comm, config, copy.deepcopy(HEADS.body))
            judge, *_ = start(comm, config, copy.deepcopy(HEADS.heads[0]))
            for step in range(8):
                x = batch(comm.rank, step)[0]
                made = generator(x)
                generator.backward(judge(made).square().mean())
                generator.step()
                judge.zero_grad()
                judge.backward((judge(x[:, :4]) - judge(made.detach())).mean())
                judge.step()
            results.append([p.clone() for e in (generator, judge) for p in parameters(e)])
            rounds = [e._overlap.info().rounds for e in (generator, judge) if section]
            assert rounds == [8, 8][: len(rounds)]
            judge.close()
            generator.close()
        assert all(map(torch.equal, *results))

    thread_ranks(2, body)


def test_unused_parameters_are_an_error_where_the_file_says_so():
    def body(comm):
        section = {"overlap": {"unused": "error"}}
        config = {"optimizer": ADAM, "sotto": section}
        engine, *_ = start(comm, config, copy.deepcopy(HEADS))
        with pytest.raises(sotto.InvalidStateError, match='"heads.1.weight", "heads.1.bias"'):
            engine.backward(engine(batch(comm.rank, 0)[0], 0))
        engine.close()

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
