"""LAMB without Sotto is Sotto's LAMB to rounding, and its schedule the library's."""

import json

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from bert import Bert, ModelShape  # noqa: E402
from lamb import ConfigError, Lamb, Schedule  # noqa: E402
from launched import CONFIGS  # noqa: E402
from log import Log  # noqa: E402

import sotto  # noqa: E402
import sotto.torch as st  # noqa: E402

SHAPE = ModelShape(vocab=20, width=16, layers=2, heads=2, mlp=32, positions=8)


def config():
    return json.loads((CONFIGS / "lamb.json").read_text())


def lamb_of(content, model):
    report = sotto.config_report(content, world_size=1)
    schedule = Schedule(content.get("scheduler"), report["optimizer"]["params"]["lr"])
    return Lamb(model.groups(), report, schedule)


def gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step % 3 - 2)


def test_updates_are_sottos():
    """Small gradients and ones that are clipped; groups with and without weight decay."""
    content = config()
    params = {**content["optimizer"]["params"], "lr": 0.01}
    del content["scheduler"]
    content["optimizer"]["params"] = params
    mine, theirs = Bert(SHAPE, 1), Bert(SHAPE, 1)
    optimizer = lamb_of(content, mine)
    groups = theirs.groups()
    groups[1]["weight_decay"] = 0.0
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        sottos = st.Lamb(groups, **params, gradient_clipping=1.0, comm=comm)
        for step in range(30):
            for model in (mine, theirs):
                gradients(model, step)
            norm = torch.cat([p.grad.flatten() for p in mine.parameters()]).norm().item()
            optimizer.step()
            sottos.step()
            assert optimizer.grad_norm == pytest.approx(norm, rel=1e-5)
        sottos.close()
    moved = 0.0
    for (name, a), b, start in zip(
        mine.named_parameters(), theirs.parameters(), Bert(SHAPE, 1).parameters()
    ):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, msg=lambda text, n=name: n + text)
        moved = max(moved, (a - start).abs().max().item())
    assert moved > 0.05


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupLR", None])
def test_schedule_is_the_librarys(kind):
    content = config()
    if kind is None:
        del content["scheduler"]
    else:
        content["scheduler"]["type"] = kind
    if kind == "WarmupLR":
        del content["scheduler"]["params"]["total_num_steps"]
    schedule = Schedule(content.get("scheduler"), content["optimizer"]["params"]["lr"])
    rates = sotto.config_report(content, world_size=1)["schedule"]["lr"]
    assert len(rates) > (0 if kind is None else 4)
    for rate in rates:
        assert schedule.rate(rate["update"]) == pytest.approx(rate["groups"][0], rel=1e-12)


def test_what_it_does_not_know_is_refused():
    content = config()
    content["optimizer"]["params"]["bias_correction"] = True
    with pytest.raises(ConfigError, match="bias_correction"):
        lamb_of(content, Bert(SHAPE, 1))
    content = config()
    content["scheduler"]["type"] = "OneCycle"
    with pytest.raises(ConfigError, match="OneCycle"):
        Schedule(content["scheduler"], 0.1)
    content = config()
    del content["scheduler"]["params"]["warmup_type"]
    with pytest.raises(ConfigError, match="warmup_type"):
        Schedule(content["scheduler"], 0.1)


def test_state_continues_bit_for_bit():
    whole, first, second = Bert(SHAPE, 1), Bert(SHAPE, 1), Bert(SHAPE, 2)
    optimizer = lamb_of(config(), whole)
    for step in range(8):
        gradients(whole, step)
        optimizer.step()
    optimizer = lamb_of(config(), first)
    for step in range(5):
        gradients(first, step)
        optimizer.step()
    resumed = lamb_of(config(), second)
    second.load_state_dict(first.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for step in range(5, 8):
        gradients(second, step)
        resumed.step()
    for a, b in zip(whole.parameters(), second.parameters()):
        assert torch.equal(a, b)


def test_a_log_is_cut_back_to_the_checkpoint(tmp_path):
    path = tmp_path / "log"
    log = Log(str(path), None)
    log.write({"step": 1, "loss": float("nan")})
    length = log.length()
    log.write({"step": 2})
    log.close()
    log = Log(str(path), length)
    log.write({"step": 3})
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1, "loss": None}, {"step": 3}]
