"""Optimizers on plain buffers."""

import array
import io
import json
import math

import numpy as np
import pytest
from ranks import run_ranks, thread_ranks

import sotto
from sotto.optim import Optimizer, Param

f32 = np.float32
KINDS = {
    "SGD": {"momentum": 0.9},
    "Adam": {},
    "AdamW": {"weight_decay": 0.01},
    "Lamb": {},
    "Lion": {"weight_decay": 0.01},
    "OneBitAdam": {"freeze_step": 4},
    "ZeroOneAdam": {
        "var_freeze_step": 5,
        "var_update_scaler": 2,
        "local_step_scaler": 4,
        "local_step_clipper": 2,
    },
    "OneBitLamb": {"freeze_step": 4},
}


class Problem:
    """Least squares towards a point that differs between ranks."""

    def __init__(self, comm, kind="Adam", n=3000, config=None, **hyper):
        rng = np.random.default_rng(1)
        self.p = rng.standard_normal(n).astype(f32)
        self.g = np.zeros_like(self.p)
        self.target = rng.standard_normal(n).astype(f32) + comm.rank
        params = [
            Param(self.p[:1000], self.g[:1000], "first"),
            (self.p[1000:], self.g[1000:], "second"),
        ]
        if config is None:
            hyper = {"lr": 0.01, **KINDS[kind], **hyper}
            self.optimizer = Optimizer(params, kind=kind, comm=comm, **hyper)
        else:
            self.optimizer = Optimizer(params, config, comm=comm)

    def steps(self, n):
        for _ in range(n):
            self.g[:] = self.p - self.target
            self.optimizer.step().wait()
        return self

    def close(self):
        self.optimizer.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_alike_on_all_ranks(kind):
    def body(comm):
        problem = Problem(comm, kind)
        start = problem.p.copy()
        problem.steps(12)
        info = problem.optimizer.info()
        assert info.step == 12
        assert info.stage == int(kind.startswith(("OneBit", "ZeroOne")))
        if kind == "ZeroOneAdam":  # parameters meet again at synchronisations
            problem.optimizer.synchronize().wait()
        problem.close()
        return np.abs(problem.p - start).mean(), problem.p

    results = thread_ranks(2, body)
    assert results[0][0] > 0.01
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_adamw_is_the_known_formula():
    def body(comm):
        problem = Problem(comm, "AdamW")
        p = problem.p.astype(np.float64)
        m, v = np.zeros_like(p), np.zeros_like(p)
        target = problem.target - comm.rank + 0.5
        for t in range(1, 6):
            g = p - target
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            p -= 0.01 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + 0.01 * p)
        problem.steps(5).close()
        np.testing.assert_allclose(problem.p, p, rtol=1e-5, atol=1e-5)

    thread_ranks(2, body)


CONFIG = {
    "optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
    "gradient_clipping": 1.0,
    "sotto": {"param_groups": [{}]},
}


@pytest.mark.parametrize("form", ["dict", "text", "path"])
def test_configurations(form, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    config = {"dict": CONFIG, "text": json.dumps(CONFIG), "path": path}[form]
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        problem = Problem(comm, config=config)
        assert problem.optimizer.info().lr == 0
        assert problem.steps(4).optimizer.info().lr > 0
        assert problem.optimizer.report("config")
        problem.close()
    assert sotto.config_report(config, world_size=4, n_params=1000)


@pytest.mark.parametrize("mode", ["exact", "mean", "reset"])
@pytest.mark.parametrize("kind", ["Adam", "OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_state_is_restored(kind, mode):
    def body(comm):
        problem = Problem(comm, kind).steps(6)
        state = problem.optimizer.export_state(mode)
        wanted = problem.steps(4).p.copy()
        problem.close()
        other = Problem(comm, kind)
        other.optimizer.import_state(state, mode)
        assert other.optimizer.info().step == 6
        other.steps(4).close()
        if mode == "exact" or kind == "Adam":
            np.testing.assert_array_equal(other.p, wanted)
        elif mode == "mean":
            assert np.median(np.abs(other.p - wanted)) < 0.02
        return bytes(state)

    states = thread_ranks(2, body)
    assert (states[0] == states[1]) == (mode != "exact" or kind == "Adam")


@pytest.mark.parametrize("mode", ["exact", "mean", "reset"])
@pytest.mark.parametrize("kind", ["AdamW", "ZeroOneAdam", "OneBitLamb"])
def test_state_in_files(kind, mode, tmp_path):
    def body(comm):
        problem = Problem(comm, kind).steps(6)
        optimizer = problem.optimizer
        optimizer.user_state = b"epoch 1"
        before = problem.p.copy()
        path = tmp_path / f"{comm.rank}"
        with open(path, "wb") as file:
            file.write(b"head")
            optimizer.write_state(file, mode)
        np.testing.assert_array_equal(problem.p, before)
        assert path.read_bytes()[4:] == bytes(optimizer.export_state(mode))
        other = Problem(comm, kind)
        with open(path, "rb") as file:
            file.seek(4)
            other.optimizer.read_state(file, mode)
            assert not file.read()
        assert other.optimizer.user_state == b"epoch 1"
        assert other.optimizer.info().step == 6
        if mode == "exact":
            np.testing.assert_array_equal(other.steps(3).p, problem.steps(3).p)
        problem.close()
        other.close()

    thread_ranks(2, body)


def test_files_that_fail(tmp_path):
    class Full:
        def write(self, data):
            raise OSError("no space left")

    def body(comm):
        problem = Problem(comm, "OneBitAdam").steps(6)
        # The collective goes on for the other rank.
        if comm.rank == 1:
            with pytest.raises(OSError, match="no space left"):
                problem.optimizer.write_state(Full(), "mean")
        else:
            problem.optimizer.write_state(io.BytesIO(), "mean")
        state = bytes(problem.optimizer.export_state("exact"))
        with pytest.raises(sotto.InvalidArgumentError, match="truncated"):
            problem.optimizer.read_state(io.BytesIO(state[:-8]), "exact")
        problem.steps(1).close()

    thread_ranks(2, body)


def test_values_that_differ_between_ranks():
    def body(comm):
        def make(policy, x):
            p = np.full(8, x, f32)
            config = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
            if policy is not None:
                config["sotto"] = {"initial_parameters": policy}
            return Optimizer([(p, np.ones(8, f32), "w")], config, comm=comm), p

        with pytest.raises(sotto.ProtocolError, match='"w" has other values on rank 1 than'):
            make(None, comm.rank)
        optimizer, p = make("broadcast", comm.rank + 3.0)
        assert p.tolist() == [3.0] * 8
        optimizer.close()
        make("trust", comm.rank)[0].close()
        # Before the first step and after it.
        for steps in (0, 2):
            optimizer, p = make("check", 1.0)
            for _ in range(steps):
                optimizer.step().wait()
            state = optimizer.export_state("exact")
            optimizer.import_state(state, "exact")
            optimizer.step().wait()
            optimizer.close()

    thread_ranks(2, body)


def test_learning_rates_that_differ_between_ranks():
    def body(comm):
        problem = Problem(comm, "Adam").steps(1)
        problem.optimizer.set("lr", 0.5 + comm.rank)
        with pytest.raises(sotto.ProtocolError, match="learning rate, .* of group 0 differ"):
            problem.steps(1)

    thread_ranks(2, body)


def test_settings_during_training():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        problem = Problem(comm, "Adam")
        problem.optimizer.set("lr", 0.5)
        assert problem.optimizer.info().lr == 0.5
        problem.optimizer.set("lr", math.nan)
        assert problem.optimizer.info().lr == 0.01
        with pytest.raises(sotto.InvalidArgumentError, match="colour"):
            problem.optimizer.set("colour", 1)
        problem.optimizer.set("lr", np.array(0.25, f32), np.int64(0))
        assert problem.optimizer.info().lr == 0.25
        for value, group, text in (
            ("0.5", 0, "lr is '0.5'; allowed: a number"),
            (None, 0, "lr is None"),
            (0.5, 2**32, "group is 4294967296; allowed: a whole number from -1"),
            (0.5, 0.0, "group is 0.0"),
        ):
            with pytest.raises(sotto.InvalidArgumentError, match=text):
                problem.optimizer.set("lr", value, group)
        assert problem.optimizer.info().lr == 0.25
        problem.close()


def test_a_schedule_goes_on_from_anywhere():
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10, "warmup_type": "linear"},
        },
    }
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        problem = Problem(comm, config=config).steps(3)
        optimizer = problem.optimizer
        assert optimizer.report("config")["scheduler_iteration"] == 2
        for iteration, lr in ((6, 0.06), (-1, 0.0), (0, 0.0), (1000, 0.1)):
            optimizer.set("scheduler_iteration", iteration)
            assert optimizer.report("config")["scheduler_iteration"] == iteration
            assert optimizer.info().lr == pytest.approx(lr)
        for group, value, text in (
            (-1, -2, "scheduler_iteration is -2; allowed: -1 and whole"),
            (-1, 0.5, "scheduler_iteration is 0.5"),
            (-1, math.nan, "scheduler_iteration is nan"),
            (-1, 1e300, "scheduler_iteration is 1e"),
            (0, 3, "group is 0; scheduler_iteration is one for all"),
        ):
            with pytest.raises(sotto.InvalidArgumentError, match=text):
                optimizer.set("scheduler_iteration", value, group)
        problem.close()
        problem = Problem(comm, "Adam")
        with pytest.raises(sotto.InvalidArgumentError, match="there is no scheduler"):
            problem.optimizer.set("scheduler_iteration", 3)
        problem.close()


def test_accumulation_is_the_mean_of_micro_batches():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        one, two = Problem(comm, "SGD", momentum=0.0), Problem(comm, "SGD", momentum=0.0)
        one.g[:] = 2
        one.optimizer.step().wait()
        two.g[:] = 1
        two.optimizer.accumulate().wait()
        assert two.optimizer.info().micro_batches == 1
        two.g[:] = 3
        two.optimizer.step().wait()
        np.testing.assert_array_equal(one.p, two.p)
        one.close()
        two.close()


def test_masks_copies_and_half_gradients():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        p, g = np.ones(16, f32), np.ones(16, np.float16)
        copy, mask = np.zeros(16, np.float16), np.arange(16) % 2 == 0
        with Optimizer(
            [Param(p, g, model_copy=copy, mask=mask)], kind="OneBitAdam", lr=0.1, comm=comm
        ) as optimizer:
            optimizer.step().wait()
        np.testing.assert_array_equal(copy, p.astype(np.float16))
        assert (p != 1).any()


def test_arrays_of_a_checkpoint():
    def body(comm):
        problem = Problem(comm, "Adam")
        arrays = {"step": np.array([7])}
        arrays |= {"exp_avg": np.full(3000, 0.5, f32), "exp_avg_sq": np.full(3000, 2.0, f32)}
        problem.optimizer.import_arrays({f"group:0/{k}": v for k, v in arrays.items()})
        assert problem.optimizer.info().step == 7
        with pytest.raises(sotto.InvalidArgumentError, match="exp_avg"):
            problem.optimizer.import_arrays({"group:0/exp_av": arrays["exp_avg"]})
        problem.close()

    thread_ranks(2, body)


def test_nonfinite_gradients_change_nothing_and_leave_the_group_healthy():
    def body(comm):
        problem = Problem(comm, "Adam")
        before = problem.p.copy()
        problem.g[:] = np.nan if comm.rank else 1.0
        with pytest.raises(sotto.NonfiniteError):
            problem.optimizer.step().wait()
        np.testing.assert_array_equal(problem.p, before)
        problem.steps(1).close()
        assert (problem.p != before).any()

    thread_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "neither config nor kind"),
        ({"config": {}, "kind": "Adam"}, "both given"),
        ({"config": {}, "lr": 1}, "hyper-parameters"),
        ({"kind": "Adamm"}, "Adamm"),
        ({"kind": "Adam", "learning_rate": 1}, "learning_rate"),
        ({"kind": "OneBitAdam", "freeze_step": 0}, "freeze_step"),
        ({"config": "{"}, "configuration"),
    ],
)
def test_wrong_configurations(arguments, text):
    p = np.zeros(4, f32)
    comm = sotto.create_comm(world_size=1, cpu_threads=1)
    with comm, pytest.raises(sotto.InvalidArgumentError, match=text):
        Optimizer([(p, p.copy())], comm=comm, **arguments)


def frozen(x):
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("param", "error", "text"),
    [
        ((np.zeros(4), np.zeros(4, f32)), sotto.UnsupportedError, "param is fp64|param is float64"),
        ((np.zeros(4, f32), np.zeros(5, f32)), sotto.InvalidArgumentError, "count is 5"),
        (
            (np.zeros(8, f32)[::2], np.zeros(4, f32)),
            sotto.InvalidArgumentError,
            r"params\[0\].param is not contiguous",
        ),
        ((frozen(np.zeros(4, f32)), np.zeros(4, f32)), sotto.InvalidArgumentError, "read-only"),
        ((np.zeros(4, f32), np.zeros(4, f32), "a", -1), sotto.InvalidArgumentError, "group is -1"),
        # Two rows could be a parameter and its gradient.
        (np.zeros((2, 4), f32), sotto.InvalidArgumentError, r"params\[0\] is of type ndarray"),
    ],
)
def test_wrong_params(param, error, text):
    comm = sotto.create_comm(world_size=1, cpu_threads=1)
    with comm, pytest.raises(error, match=text):
        Optimizer([param], kind="Adam", comm=comm)


@pytest.mark.parametrize("kind", [bytes, bytearray, np.array])
def test_user_state_is_anything_with_bytes(kind):
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        optimizer = Problem(comm, "Adam").optimizer
        optimizer.user_state = kind(np.arange(3, dtype=np.uint8))
        assert optimizer.user_state == b"\0\1\2"
        with pytest.raises(TypeError, match="bytes-like"):
            optimizer.user_state = "abc"
        assert optimizer.user_state == b"\0\1\2"
        optimizer.close()


def test_ranks_that_differ_are_refused():
    def body(comm):
        p = np.zeros(4 + comm.rank, f32)
        with pytest.raises(sotto.ProtocolError):
            Optimizer([(p, p.copy())], kind="Adam", comm=comm)

    thread_ranks(2, body)


def test_arrays_stay_where_they_are():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        p, g = array.array("f", [1] * 8), array.array("f", [1] * 8)
        with Optimizer([(p, g)], kind="SGD", lr=0.5, comm=comm) as optimizer:
            optimizer.step().wait()
            with pytest.raises(BufferError):
                p.append(1)
        assert p.tolist() == [0.5] * 8


def rank_trains(comm):
    problem = Problem(comm, "OneBitAdam").steps(20)
    low, high = problem.p.copy(), problem.p.copy()
    comm.all_reduce([low], op="min").wait()
    comm.all_reduce([high], op="max").wait()
    np.testing.assert_array_equal(low, high)
    problem.close()


@pytest.mark.parametrize("size", [2, 4])
def test_processes(size):
    run_ranks(size, __file__, "rank_trains")


def test_gradients_that_move():
    def body(comm):
        fixed, moving = Problem(comm, "OneBitLamb"), Problem(comm, "OneBitLamb")
        for _ in range(6):
            fixed.steps(1)
            g = moving.p - moving.target
            moving.optimizer.set_grads([g[:1000], g[1000:]])
            del g
            moving.optimizer.step().wait()
            assert np.array_equal(fixed.p, moving.p)
        for grads, text in (
            ([moving.g], "n is 1; it has to be 2"),
            ([moving.g[:1000], moving.g[1001:]], 'grads\\[1\\], of parameter "second", has 1999'),
            ([moving.g[:1000], np.zeros(2000, np.float16)], "fp16; registered were 2000 of fp32"),
            ([moving.g[:1000], moving.g[::1][::2]], "not contiguous"),
        ):
            with pytest.raises(sotto.InvalidArgumentError, match=text):
                moving.optimizer.set_grads(grads)
        fixed.close()
        moving.close()

    thread_ranks(2, body)


def test_config_resolve(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "auto", # a comment\n "fp16": {"enabled": "auto"},}')
    assert sotto.config_resolve(path) == {"train_batch_size": "auto", "fp16": {"enabled": "auto"}}
    values = {"train_batch_size": 8, "fp16.enabled": False, "bf16.enabled": True}
    assert sotto.config_resolve(path, values) == {"train_batch_size": 8, "fp16": {"enabled": False}}
    with pytest.raises(sotto.InvalidArgumentError, match="line 1, column 6"):
        sotto.config_resolve('{"a":}')
