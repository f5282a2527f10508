"""Checkpoints of sotto.deepspeed's engine, and those of DeepSpeed's."""

import argparse
import collections
import datetime
import enum
import re
import shutil

import pytest
from ranks import thread_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import LAMB, Loss, batch, parameters, run, start  # noqa: E402

import sotto  # noqa: E402
import sotto.deepspeed.files as checkpoint_files  # noqa: E402
from sotto.deepspeed.weights import get_fp32_state_dict_from_zero_checkpoint  # noqa: E402


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


class Shard:
    """What a program of Megatron's kind says of its model-parallel ranks."""

    def __init__(self, rank):
        self.get_model_parallel_rank = lambda: rank
        self.get_model_parallel_world_size = lambda: 2
        self.get_data_parallel_group = lambda: None


@pytest.mark.parametrize("checkpoint", ["exact", "mean"])
def test_shards_are_saved_beside_each_other(checkpoint, comm, tmp_path):
    config = {"optimizer": LAMB, "sotto": {"checkpoint": checkpoint}}
    engines = [start(comm, config, mpu=Shard(rank))[0] for rank in range(2)]
    for rank, engine in enumerate(engines):
        run(engine, rank, range(3))
    wanted = [parameters(engine) for engine in engines]
    assert not torch.equal(wanted[0][0], wanted[1][0])
    for engine in engines:
        engine.save_checkpoint(tmp_path, tag="both")
        engine.save_16bit_model(tmp_path)
    states = sorted(path.name for path in (tmp_path / "both").glob("mp_rank_*"))
    assert states == ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"]
    with pytest.raises(sotto.UnsupportedError, match="2 model-parallel shards"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    first = torch.load(tmp_path / "pytorch_model.bin")
    assert torch.equal(first["net.0.weight"], wanted[0][0])
    for rank, engine in enumerate(engines):
        run(engine, rank, range(3, 5))
        engine.load_checkpoint(tmp_path)
        assert engine.loaded_checkpoint_mp_world_size == 2
        assert all(torch.equal(p, q) for p, q in zip(parameters(engine), wanted[rank]))
        engine.close()


@pytest.mark.parametrize("checkpoint", ["exact", "mean", "reset"])
def test_checkpoints(checkpoint, tmp_path):
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": LAMB,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "sotto": {"checkpoint": checkpoint},
    }

    def body(comm):
        engine, *_ = start(comm, config)
        run(engine, comm.rank, range(6))
        assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "seen": [1, 2]})
        lr = engine.get_lr()
        wanted = run(engine, comm.rank, range(6, 10))
        engine.save_checkpoint(tmp_path, tag="later", save_latest=False)
        engine.close()

        net = Loss()
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
        other, *_ = start(comm, config, net)
        path, client = other.load_checkpoint(tmp_path)
        assert client == {"epoch": 3, "seen": [1, 2]}
        assert path == str(tmp_path / "global_step6" / "mp_rank_00_model_states.pt")
        assert (other.global_steps, other.global_samples, other.micro_steps) == (
            6,
            96 * comm.size,
            6,
        )
        assert other.get_lr() == lr
        got = run(other, comm.rank, range(6, 10))
        same = all(torch.equal(p, q) for p, q in zip(parameters(engine), parameters(other)))
        assert same == (checkpoint == "exact")
        assert got == pytest.approx(wanted, rel=0.1)
        run(other, comm.rank, [10])
        other.load_checkpoint(tmp_path, tag="later", load_optimizer_states=False)
        assert (other.global_steps, other.optimizer.info().step) == (10, 11)  # it keeps its own
        other.close()

    thread_ranks(2, body)
    assert (tmp_path / "latest").read_text() == "global_step6"
    files = {p.name for p in (tmp_path / "global_step6").iterdir()}
    ranks = {f"sotto_rank_0{r}_optim_states.pt" for r in (0, 1)} if checkpoint == "exact" else set()
    assert files == {"mp_rank_00_model_states.pt"} | ranks


@pytest.mark.parametrize("outer", [None, {"preset": "diloco", "period": 2, "codec": "int8"}])
def test_checkpoints_without_error_feedback(outer, tmp_path):
    section = {"checkpoint": "reset", **({} if outer is None else {"outer": outer})}
    states = [None, None]

    def body(comm):
        engine, optimizer, _, _ = start(comm, {"optimizer": LAMB, "sotto": section})
        run(engine, comm.rank, range(7))
        engine.save_checkpoint(tmp_path)
        states[comm.rank] = optimizer._optim.export_state("reset")
        ends = [run(engine, comm.rank, range(7, 11)) and parameters(engine)]
        for load in (
            lambda: engine.load_checkpoint(tmp_path),
            lambda: optimizer._optim.import_state(states[0], "reset"),
        ):
            load()
            run(engine, comm.rank, range(7, 11))
            ends.append(parameters(engine))
        engine.close()
        return ends

    for goes_on, loaded, reset in thread_ranks(2, body):
        assert all(torch.equal(p, q) for p, q in zip(loaded, reset))
        assert not all(torch.equal(p, q) for p, q in zip(loaded, goes_on))


def test_error_feedback_of_outer_steps_has_no_mean(tmp_path):
    """Every rank goes on from its own checkpoint, with the loss scale that it had."""
    outer = {"preset": "co2", "period": 3, "codec": "onebit"}
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
    }

    def steps(engine, rank, numbers):
        for step in numbers:
            x, y = batch(rank, step)
            loss = engine(x.half(), y)
            engine.backward(loss * 1e30 if (rank, step) in ((1, 4), (1, 5), (0, 9)) else loss)
            engine.step()

    def body(comm):
        section = {"outer": outer}
        engine, *_ = start(comm, {**config, "sotto": section})
        steps(engine, comm.rank, range(2))
        remedy = r'checkpoint="exact" or "reset" here, "sotto": {"checkpoint": ...} in a file'
        with pytest.raises(sotto.UnsupportedError, match=re.escape(remedy)):
            engine.save_checkpoint(tmp_path)
        engine.close()
        section["checkpoint"] = "exact"
        engine, *_ = start(comm, {**config, "sotto": section})
        steps(engine, comm.rank, range(8))
        engine.save_checkpoint(tmp_path)
        scale = engine.cur_scale
        steps(engine, comm.rank, range(8, 14))
        other, *_ = start(comm, {**config, "sotto": section})
        other.load_checkpoint(tmp_path)
        assert other.cur_scale == scale
        steps(other, comm.rank, range(8, 14))
        assert all(map(torch.equal, parameters(engine), parameters(other)))
        assert other.cur_scale == engine.cur_scale
        engine.close()
        other.close()
        return scale

    scales = thread_ranks(2, body)
    assert scales[0] > scales[1]


def test_exact_checkpoints_on_disks_of_their_own(tmp_path):
    """Every rank writes to its own machine's disk; what is merged behind it loads on all."""
    config = {"optimizer": LAMB, "sotto": {"checkpoint": "exact"}}

    def body(comm):
        engine, *_ = start(comm, config)
        run(engine, comm.rank, range(6))
        engine.save_checkpoint(tmp_path / f"disk{comm.rank}")
        if comm.rank == 0:
            for disk in ("disk0", "disk1"):
                shutil.copytree(tmp_path / disk, tmp_path / "merged", dirs_exist_ok=True)
        comm.barrier().wait()
        run(engine, comm.rank, range(6, 10))
        engine.close()
        other, *_ = start(comm, config, Loss())
        other.load_checkpoint(tmp_path / "merged")
        run(other, comm.rank, range(6, 10))
        assert all(torch.equal(p, q) for p, q in zip(parameters(engine), parameters(other)))
        other.close()

    thread_ranks(2, body)
    assert {p.name for p in (tmp_path / "disk1").rglob("*.pt")} == {"sotto_rank_01_optim_states.pt"}


@pytest.mark.parametrize("tag", ["run2/step1", "", 7])
def test_latest_has_the_tag_as_it_was_given(tag, comm, tmp_path):
    engine, *_ = start(comm, {"optimizer": LAMB})
    engine.save_checkpoint(tmp_path, tag="step1")
    run(engine, 0, range(2))
    engine.save_checkpoint(tmp_path, tag=tag)
    assert (tmp_path / "latest").read_text() == str(tag)
    path, _ = engine.load_checkpoint(tmp_path)
    assert path == str(tmp_path / str(tag) / checkpoint_files.MODEL_FILE)
    assert engine.global_steps == 2
    engine.close()


@pytest.mark.parametrize("in_the_library", [True, False])
def test_a_checkpoint_between_updates(comm, tmp_path, in_the_library):
    """Micro-batches of an open update are left out of it, and the engine goes on with them."""
    config = {"train_micro_batch_size_per_gpu": 16, "optimizer": LAMB}
    three = {**config, "gradient_accumulation_steps": 3}
    engine, *_ = start(comm, three if in_the_library else config)
    undisturbed, *_ = start(comm, three)
    engine.set_train_batch_size(48)
    for steps in (range(3), [3], [4, 5]):
        run(engine, 0, steps)
        run(undisturbed, 0, steps)
        engine.save_checkpoint(tmp_path, tag=str(engine.micro_steps))
    torch.testing.assert_close(parameters(engine), parameters(undisturbed))
    other, *_ = start(comm, three)
    for tag in ("4", "3"):  # in the middle of an update, and behind one
        run(other, 0, [7])
        other.load_checkpoint(tmp_path, tag=tag)
        counts = []
        for step in range(6):
            run(other, 0, [3 + step % 3])
            counts.append(other.global_steps)
            if step == 2:
                torch.testing.assert_close(parameters(other), parameters(engine))
        assert counts == [1, 1, 2, 2, 2, 3]
    for one in (engine, undisturbed, other):
        one.close()


def test_no_checkpoint_is_no_error(comm, tmp_path):
    engine, *_ = start(comm, {"optimizer": LAMB})
    with pytest.warns(UserWarning, match="no checkpoint was loaded"):
        assert engine.load_checkpoint(tmp_path) == (None, None)


def test_checkpoints_that_are_refused(tmp_path):
    def body(comm):
        engine, *_ = start(comm, {"optimizer": LAMB})
        error, text = sotto.InvalidArgumentError, r"client_state\['who'\] is of type object"
        if comm.rank:
            error, text = sotto.SottoError, "writing the checkpoint failed on rank 0"
        with pytest.raises(error, match=text):
            engine.save_checkpoint(tmp_path, client_state={"who": object()})
        if comm.rank == 1:
            state = {"module": engine.module.state_dict(), "optimizer": {}}
            checkpoint_files.write(tmp_path / checkpoint_files.MODEL_FILE, state)
        comm.barrier().wait()
        # One rank finds nothing; the other hears of it.
        with pytest.raises(sotto.SottoError if comm.rank else FileNotFoundError):
            engine.load_checkpoint(tmp_path, tag="absent" if comm.rank == 0 else ".")
        engine.close()

    thread_ranks(2, body)


class Attributes(dict):
    """As easydict and others have it."""


class Phase(enum.IntEnum):
    WARM = 1


class Kind(str, enum.Enum):
    A = "a"


Point = collections.namedtuple("Point", "x y")


class Dated(Loss):
    def get_extra_state(self):
        return {"day": datetime.date(2020, 1, 1)}

    def set_extra_state(self, state):
        pass


class Own(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer):
        self.phases = [Phase.WARM]
        super().__init__(optimizer)

    def get_lr(self):
        return self.base_lrs


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Attributes(a=1), r"\['v'\] is of type Attributes"),
        ([{"a": collections.defaultdict(list)}], r"\['v'\]\[0\]\['a'\] is of type defaultdict"),
        (Phase.WARM, r"\['v'\] is of type Phase"),
        ({Kind.A: 1}, r"\['v'\] key <Kind.A: 'a'> is of type Kind"),
        ((1, Point(1, 2)), r"\['v'\]\[1\] is of type Point"),
        (argparse.Namespace(kind=Kind.A), r"\['v'\]\['kind'\] is of type Kind"),
        (lambda: 0, r"\['v'\] is of type function"),
    ],
)
def test_client_state_that_could_not_be_read(value, text, comm, tmp_path):
    engine, *_ = start(comm, {"optimizer": LAMB})
    with pytest.raises(sotto.InvalidArgumentError, match="client_state" + text):
        engine.save_checkpoint(tmp_path, client_state={"v": value, "good": {"a": (1, {2})}})
    assert list(tmp_path.rglob("*.pt*")) == []
    assert not (tmp_path / "latest").exists()


def test_state_of_others_that_could_not_be_read(comm, tmp_path):
    """Of the model, of a group of the optimizer, and of a schedule."""
    net = Loss()
    group = [{"params": list(net.parameters()), "kind": Kind.A}]
    for model, options, text in (
        (Dated(), {}, r"module\['_extra_state'\]\['day'\] is of type date"),
        (net, {"model_parameters": group}, r"optimizer\['param_groups'\]\[0\]\['kind'\] is of"),
        (Loss(), {"lr_scheduler": lambda o: Own(o)}, r"lr_scheduler\['phases'\]\[0\] is of type"),
    ):
        engine, *_ = start(comm, {"optimizer": LAMB}, model, **options)
        with pytest.raises(sotto.InvalidArgumentError, match=text):
            engine.save_checkpoint(tmp_path)
        engine.close()


def test_a_checkpoint_of_deepspeed(comm, tmp_path):
    """AdamW's state as DeepSpeed's engine saves it: training goes on as torch's AdamW does."""
    hyper = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    net = Loss()
    theirs = torch.optim.AdamW(net.parameters(), **hyper)

    def go(steps):
        for step in steps:
            theirs.zero_grad()
            net(*batch(0, step)).backward()
            theirs.step()

    go(range(5))
    state = {
        "module": net.state_dict(),
        "optimizer": theirs.state_dict(),
        "lr_scheduler": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 1,
        "global_steps": 6,
        "global_samples": 96,
        "dp_world_size": 8,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.18.9",
        "epoch": 4,
    }
    (tmp_path / "old").mkdir()
    torch.save(state, tmp_path / "old" / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("old")
    go(range(5, 10))

    config = {"optimizer": {"type": "AdamW", "params": hyper}, "train_batch_size": 16}
    engine, *_ = start(comm, config)
    assert engine.load_checkpoint(tmp_path)[1] == {"epoch": 4}
    assert (engine.global_steps, engine.skipped_steps, engine.optimizer.info().step) == (6, 1, 5)
    run(engine, 0, range(5, 10))
    for p, q in zip(engine.module.parameters(), net.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    engine.close()
    groups = [{"params": [p]} for p in Loss().parameters()]
    other, *_ = start(comm, config, model_parameters=groups)
    with pytest.raises(
        sotto.InvalidArgumentError, match=r"groups have \[4\] tensors.*\[1, 1, 1, 1"
    ):
        other.load_checkpoint(tmp_path)
    state["optimizer"] = None
    torch.save(state, tmp_path / "old" / "mp_rank_00_model_states.pt")
    with pytest.raises(sotto.InvalidArgumentError, match="no optimizer state"):
        engine.load_checkpoint(tmp_path)
