"""DeepSpeed's names: every public member is served or refused with a hint; what is served works."""

import argparse
import importlib
import importlib.util
import math
import os
import re
import subprocess
import sys
import types
from datetime import timedelta
from pathlib import Path

import pytest
from ranks import run_ranks

torch = pytest.importorskip("torch", reason="torch is not installed in this Python")

from deepspeed_support import LAMB, Loss, batch, start  # noqa: E402

import sotto  # noqa: E402
import sotto.deepspeed as sd  # noqa: E402
from sotto.deepspeed import lr_schedules, members, modules  # noqa: E402

os.environ.setdefault("DS_ACCELERATOR", "cpu")
CONFIG = {"train_micro_batch_size_per_gpu": 16, "optimizer": LAMB}
# Methods that need arguments, or a state that a fresh engine has not.
WITH_ARGUMENTS = {
    "backward",
    "deepspeed_io",
    "is_iterable_style_dataset",
    "is_map_style_dataset",
    "load_checkpoint",
    "load_module_state_dict",
    "save_16bit_model",
    "save_checkpoint",
    "save_fp16_model",
    "scale",
    "set_data_post_process_func",
    "set_gradient_accumulation_boundary",
    "set_train_batch_size",
    "set_train_micro_batch_size",
}


@pytest.fixture
def comm():
    with sotto.create_comm(world_size=1, cpu_threads=1) as comm:
        yield comm


@pytest.fixture
def engine(comm):
    engine, *_ = start(comm, CONFIG)
    yield engine
    engine.close()


def need_deepspeed():
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed in this Python")


def listed():
    """Every name that a table has, with the tables that have it."""
    tables = (
        members.FROM_FILE,
        members.CONSTANT,
        members.ATTRIBUTES,
        members.EMPTY,
        members.REFUSED,
        members.REFUSED_ATTRIBUTES,
    )
    return [name for table in tables for name in table]


def test_a_name_stands_in_one_table(engine):
    names = listed()
    assert len(names) == len(set(names)) > 150
    own = {name for name in names if hasattr(sd.Engine, name) or name in vars(engine)}
    assert own == set()


def test_every_member_of_deepspeeds_engine_is_known(engine):
    need_deepspeed()
    from deepspeed.runtime import engine as theirs

    source = Path(theirs.__file__).read_text(encoding="utf-8")
    given = set(re.findall(r"self\.([a-z]\w*)\s*(?::[^=\n]*)?=(?!=)", source))
    timers = {name for name in given if name.endswith("_timers")}
    methods = {name for name in dir(theirs.DeepSpeedEngine) if not name.startswith("_")}
    wanted = (methods | given | timers) - set(dir(torch.nn.Module))
    assert len(wanted) > 250
    unknown, told = [], {}
    for name in sorted(wanted):
        try:
            value = getattr(engine, name)
            if callable(value) and name in methods and name not in WITH_ARGUMENTS:
                value()
        except sotto.UnsupportedError as error:
            told[name] = str(error)
        except AttributeError:
            unknown.append(name)
    assert unknown == []
    assert len(told) > 50
    assert all(name in text for name, text in told.items())


def test_answers_are_those_of_deepspeed(engine):
    """What a method of DeepSpeed's returns for the same file, where both return a value."""
    need_deepspeed()
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 16}
    theirs = object.__new__(DeepSpeedEngine)
    torch.nn.Module.__init__(theirs)
    theirs.__dict__["_config"] = DeepSpeedConfig(config)
    theirs.__dict__["_deepcompile_active"] = False
    mine, *_ = start(engine.comm, config)
    differ = {}
    for name in [*members.FROM_FILE, *members.CONSTANT]:
        try:
            wanted = getattr(theirs, name)()
        except Exception:
            continue  # needs more of an engine
        got = getattr(mine, name)()
        if got != wanted and not (not got and not wanted):
            differ[name] = (got, wanted)
    # Other tags on other ranks are an error here, in DeepSpeed a warning.
    assert differ.pop("checkpoint_tag_validation_fail") == (True, False)
    assert differ == {}


def test_refused_members_say_what_to_do(engine):
    for name, hint in members.REFUSED.items():
        with pytest.raises(sotto.UnsupportedError, match=re.escape(hint)) as caught:
            getattr(engine, name)(1, key=2)
        assert f"engine.{name}()" in str(caught.value)
    for name, hint in members.REFUSED_ATTRIBUTES.items():
        with pytest.raises(sotto.UnsupportedError, match=re.escape(hint)):
            getattr(engine, name)
    with pytest.raises(AttributeError, match="colour"):
        _ = engine.colour
    assert engine.net is engine.module.net


def test_names_of_the_package():
    need_deepspeed()
    import deepspeed

    plumbing = {"Optimizer", "Optional", "Union", "json", "pkg_version", "sys", "torch", "types"}
    for name in set(dir(deepspeed)) - plumbing:
        if not name.startswith("_") and name not in (
            "HAS_TRITON",
            "git_version_info_installed",
            "compat",
        ):
            getattr(sd, name)
    import deepspeed.comm

    mine = importlib.import_module("sotto.deepspeed.comm")
    used = {
        name
        for name, value in vars(deepspeed.comm.comm).items()
        if isinstance(value, types.FunctionType)
        and value.__module__.startswith("deepspeed.comm")
        and not name.startswith("_")
    }
    internal = {"get_default_args", "get_debug_log_name", "get_msg_size_from_args", "timed_op"}
    internal |= {name for name in used if name.startswith(("in_", "patch_", "init_deepspeed"))}
    internal |= {"mpi_discovery", "set_backend", "enable_symm_mem_for_group"}
    internal |= {"get_tensor_kwarg", "get_tensor_position"}
    assert {name for name in used - internal if not hasattr(mine, name)} == set()
    from deepspeed.accelerator import get_accelerator

    theirs = {name for name in dir(get_accelerator()) if not name.startswith("_")}
    assert {name for name in theirs if not hasattr(sd.get_accelerator(), name)} <= {"max_mem"}


def test_paths_can_be_imported_and_what_is_refused_says_why():
    for path, (served, hint) in modules.PATHS.items():
        module = importlib.import_module(f"sotto.deepspeed.{path}")
        for name in served:
            importlib.import_module(f"sotto.deepspeed.{name}")
        made = module.NotAName
        with pytest.raises(sotto.UnsupportedError, match=re.escape(hint)):
            made(1, 2, key=3)
    from sotto.deepspeed.ops.adam import FusedAdam
    from sotto.deepspeed.pipe import PipelineModule

    assert FusedAdam is sd.ops.adam.FusedAdam

    class Stage(PipelineModule):
        pass

    assert not isinstance(torch.nn.Linear(2, 2), PipelineModule)
    for call in (Stage, lambda: sd.init_inference(torch.nn.Linear(2, 2)), sd.DeepSpeedConfig):
        with pytest.raises(sotto.UnsupportedError):
            call()
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = sd.colour
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("sotto.deepspeed.colour")


INSTALL = """
import sotto.deepspeed as deepspeed
deepspeed.install_as_deepspeed()
import deepspeed as again
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed import comm
import deepspeed.utils.zero_to_fp32
import sotto.deepspeed.comm
assert again is deepspeed and comm is sotto.deepspeed.comm
assert FusedAdam.__module__ == "sotto.deepspeed.optimizers"
assert deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
try:
    import deepspeed.nowhere
except ImportError:
    print("done")
"""


def test_install_as_deepspeed():
    run = subprocess.run(
        [sys.executable, "-c", INSTALL], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    late = "import sys, types; sys.modules['deepspeed'] = types.ModuleType('deepspeed')\n" + INSTALL
    run = subprocess.run([sys.executable, "-c", late], capture_output=True, text=True, check=False)
    assert "DeepSpeed itself is imported already" in run.stderr


# ---- command lines and schedules -----------------------------------------------------------------


def test_arguments(comm, tmp_path):
    parser = sd.add_tuning_arguments(sd.add_config_arguments(argparse.ArgumentParser()))
    parser.add_argument("--local_rank", type=int, default=-1)
    path = tmp_path / "ds.json"
    path.write_text('{"optimizer": {"type": "Lamb"}}')
    args = parser.parse_args(
        ["--deepspeed", "--deepspeed_config", str(path), "--lr_schedule", "OneCycle"]
    )
    assert (args.deepspeed, args.deepscale, args.warmup_max_lr) == (True, False, 0.001)
    engine, *_ = sd.initialize(args, Loss(), comm=comm)
    assert args.local_rank == engine.local_rank >= 0
    assert engine.optimizer_name() == "lamb"
    engine.close()
    with pytest.raises(sotto.InvalidArgumentError, match="2 configurations are given"):
        sd.initialize(args, Loss(), config={}, comm=comm)
    with pytest.raises(sotto.UnsupportedError, match="mesh_param"):
        sd.initialize(None, Loss(), config=CONFIG, mesh_param=(2, 2), comm=comm)


SCHEDULES = {
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 12, "warmup_num_steps": 5, "warmup_max_lr": 0.02},
    "WarmupCosineLR": {"total_num_steps": 12, "warmup_num_steps": 5, "warmup_type": "linear"},
    "OneCycle": {
        "cycle_min_lr": 0.01,
        "cycle_max_lr": 0.1,
        "cycle_first_step_size": 4,
        "decay_step_size": 3,
        "decay_lr_rate": 0.5,
        "decay_mom_rate": 0.25,
    },
    "LRRangeTest": {"lr_range_test_step_size": 3, "lr_range_test_staircase": True},
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_are_deepspeeds(kind):
    need_deepspeed()
    from deepspeed.runtime import lr_schedules as theirs

    def rates(module):
        weights = [torch.nn.Parameter(torch.zeros(2))]
        optimizer = torch.optim.Adam(weights, lr=0.05)
        schedule = getattr(module, kind)(optimizer, **SCHEDULES[kind])
        seen = []
        for _ in range(16):
            group = optimizer.param_groups[0]
            seen += [group["lr"], group["betas"][0]]
            optimizer.step()
            schedule.step()
        state = schedule.state_dict()
        return seen, state, schedule.get_last_lr()

    mine, wanted = rates(lr_schedules), rates(theirs)
    seen, last = wanted[0], wanted[2]
    if kind == "WarmupCosineLR":  # there the rate rises again behind total_num_steps
        assert seen[30] > seen[24]
        seen[26::2], last = [seen[24]] * 3, [seen[24]]
    assert mine[0] == pytest.approx(seen, rel=1e-12)
    assert mine[1:] == (wanted[1], pytest.approx(last, rel=1e-12))


# ---- zero, activations, logs, groups -------------------------------------------------------------


def test_zero_contexts_leave_parameters_whole(comm):
    with sd.zero.Init(dtype=torch.bfloat16, remote_device="cpu", config_dict_or_path=CONFIG):
        layer = torch.nn.Linear(4, 3)
    assert (layer.weight.dtype, layer.weight.shape) == (torch.bfloat16, (3, 4))
    assert torch.nn.Linear(2, 2).weight.dtype == torch.float32
    with sd.zero.GatheredParameters(layer.parameters(), modifier_rank=0):
        torch.nn.init.zeros_(layer.weight)
    assert not layer.weight.any()
    stage3 = {"zero_optimization": {"stage": 3}}
    for options, text in (
        ({"config_dict_or_path": stage3}, "stage 3"),
        ({"remote_device": "nvme"}, "remote_device"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights"),
    ):
        with pytest.raises(sotto.UnsupportedError, match=text):
            sd.zero.Init(**options)
    sd.zero.Init(enabled=False, config_dict_or_path=stage3)
    with pytest.raises(sotto.InvalidArgumentError, match="remote_device"):
        sd.zero.Init(remote_device="cloud")


def test_activation_checkpointing():
    sd.checkpointing.configure(None, deepspeed_config=CONFIG, num_checkpoints=2)
    assert sd.checkpointing.is_configured()
    sd.checkpointing.model_parallel_cuda_manual_seed(5)
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    x = torch.randn(3, 4, requires_grad=True)
    with sd.checkpointing.get_cuda_rng_tracker().fork():
        y = sd.checkpointing.checkpoint(layer, x)
    y.sum().backward()
    kept = (y != 0).sum(0).float()  # the mask of the forward pass is the backward pass's
    torch.testing.assert_close(layer[0].bias.grad, 2 * kept)
    with pytest.raises(sotto.UnsupportedError, match="partition_activations"):
        sd.checkpointing.configure(None, partition_activations=True)
    section = {"activation_checkpointing": {"cpu_checkpointing": True}}
    with pytest.raises(sotto.UnsupportedError, match="checkpoint_in_cpu"):
        sd.checkpointing.configure(None, deepspeed_config=section)


def test_clones_share_no_memory():
    clone = importlib.import_module("sotto.deepspeed.checkpoint.utils").clone_tensors_for_torch_save
    part = torch.arange(8.0)[:2]
    state = {"a": part, "b": [part, (part, 3)], "c": "text"}
    copies = clone(state)
    assert torch.equal(copies["b"][1][0], part)
    assert copies["b"][1][1:] == (3,)
    assert copies["c"] == "text"
    assert copies["a"].untyped_storage().nbytes() == 8
    assert part.data_ptr() not in (copies["a"].data_ptr(), copies["b"][0].data_ptr())


def test_full_values_of_parameters():
    utils = importlib.import_module("sotto.deepspeed.utils")
    p, half = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3).half())
    values = utils.safe_get_full_fp32_param(p)
    assert torch.equal(values, p.detach())
    for parameter in (p, half):
        utils.safe_set_full_fp32_param(parameter, torch.full((3, 1), 2.0))
        assert parameter.tolist() == [2, 2, 2]
    assert values.tolist() == [1, 1, 1]
    with pytest.raises(sotto.UnsupportedError, match=r"torch.float16: .*optimizer.masters\(\)"):
        utils.safe_get_full_fp32_param(half)
    for name in ("safe_get_full_optimizer_state", "safe_set_full_optimizer_state"):
        with pytest.raises(sotto.UnsupportedError, match=f"{name}: .*engine.optimizer.state"):
            getattr(utils, name)(p, "exp_avg")


def test_logs(capsys):
    from sotto.deepspeed.runtime.utils import see_memory_usage
    from sotto.deepspeed.utils.logging import set_log_level_from_string

    sd.log_dist("too low", ranks=[0])
    set_log_level_from_string("info")
    sd.log_dist("to rank 0", ranks=[0])
    sd.logger.warning_once("said once")
    sd.logger.warning_once("said once")
    see_memory_usage("with force", force=True)
    see_memory_usage("without")
    set_log_level_from_string("warning")
    sd.log_dist("too low", ranks=[0])
    out = capsys.readouterr().out
    assert out.count("to rank 0") == out.count("said once") == out.count("with force") == 1
    assert "resident" in out
    assert "without" not in out
    assert "too low" not in out


def test_the_accelerator(monkeypatch):
    device = sd.get_accelerator()
    assert device is importlib.import_module("sotto.deepspeed.accelerator").get_accelerator()
    assert (device.device_name(3), device.communication_backend_name()) == ("cpu", "gloo")
    assert device.max_memory_allocated() >= device.memory_allocated() > 1 << 20
    assert device.total_memory() > device.available_memory() > 0
    with device.stream(None):
        device.manual_seed(3)
        state = device.get_rng_state()
        first = torch.rand(2)
        device.set_rng_state(state)
        assert torch.equal(first, torch.rand(2))
    with pytest.raises(sotto.UnsupportedError, match="FusedAdamBuilder"):
        device.create_op_builder("FusedAdamBuilder")
    module = importlib.import_module("sotto.deepspeed.accelerator")
    monkeypatch.setattr(module, "_chosen", None)
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    with pytest.raises(sotto.InvalidArgumentError, match="allowed: cpu, cuda"):
        sd.get_accelerator()


# ---- the process group ---------------------------------------------------------------------------


def rank_communicates():
    """No group of sotto's or torch's is there: init_distributed() makes both."""
    import sotto.deepspeed.comm as dist

    with pytest.raises(sotto.InvalidStateError, match="there is no process group"):
        dist.get_rank()
    with pytest.raises(sotto.InvalidStateError, match="dist_init_required is False"):
        sd.init_distributed(dist_init_required=False)
    with pytest.raises(sotto.InvalidArgumentError, match=r"datetime\.timedelta"):
        sd.init_distributed(timeout=30)
    with pytest.raises(sotto.InvalidArgumentError, match="dist_backend is 'carrier'"):
        sd.init_distributed("carrier")
    sd.init_distributed(timeout=timedelta(seconds=60))
    sd.init_distributed()  # again: nothing
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (sotto.default_comm().rank, sotto.default_comm().size) == (rank, size)
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == (str(rank), str(rank))
    assert dist.get_local_rank() == torch.distributed.get_rank() == rank
    dist.configure(enabled=True, prof_all=True)
    x = torch.full((4,), float(rank + 1))
    dist.all_reduce(x, log_name="mine")
    assert x.tolist() == [3.0] * 4
    dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True).wait()
    out = torch.zeros(8)
    dist.all_gather_into_tensor(output_tensor=out, tensor=torch.full((4,), float(rank)))
    assert out.tolist() == [0.0] * 4 + [1.0] * 4
    part = torch.zeros(4)
    dist.reduce_scatter_tensor(part, out)
    assert part.tolist() == [2.0 * rank] * 4
    swapped = torch.zeros(2)
    dist.all_to_all_single(output=swapped, tensor=torch.tensor([10.0 * rank, 10.0 * rank + 1]))
    assert swapped.tolist() == [float(rank), 10.0 + rank]
    if rank == 0:
        dist.send(torch.ones(2), dst=1)
    else:
        dist.recv(part[:2], src=0)
        assert part[:2].tolist() == [1, 1]
    dist.broadcast(x, src=1)
    dist.reduce(x, dst=0)
    group = dist.new_group([0, 1])
    assert dist.get_all_ranks_from_group(group) == [0, 1]
    dist.barrier(group=group)
    stats = dist.log_summary(show_straggler=True, return_dict=True)
    assert stats["summary"]["all_reduce"][16]["count"] == 2
    assert stats["metadata"]["world_size"] == size
    assert dist.get_comm_operation_count("all_reduce") == 2
    assert sd.utils.groups.get_data_parallel_world_size() == 2
    layer = torch.nn.Linear(2, 2)
    with sd.zero.GatheredParameters(layer.weight, modifier_rank=1), torch.no_grad():
        if rank == 1:
            layer.weight.fill_(7)
    assert layer.weight.eq(7).all()
    engine, *_ = sd.initialize(model=Loss(), config=CONFIG)
    assert engine.data_parallel_group is torch.distributed.group.WORLD
    engine.backward(engine(*batch(rank, 0)))
    engine.step()
    engine.destroy()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    mpu = types.SimpleNamespace(get_data_parallel_group=lambda: alone)
    engine, *_ = sd.initialize(model=Loss(), config=CONFIG, mpu=mpu)
    assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (rank, 2, 1)
    assert engine.get_data_parallel_rank() == 0
    assert [x.item() for x in engine.deepspeed_io(torch.arange(3), 1, "eval")] == [0, 1, 2]
    engine.destroy()
    dist.destroy_process_group()
    print("communicated")


def test_the_process_group():
    assert run_ranks(2, __file__, "rank_communicates").count("communicated") == 2


def test_trust_ratios_of_parameters_that_take_no_part(comm):
    from sotto.deepspeed.ops.lamb import FusedLamb

    def new():
        net = torch.nn.Linear(4, 2)
        return net, FusedLamb(net.parameters(), lr=0.01, comm=comm)

    def step(net, optimizer):
        net(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    net, optimizer = new()
    assert optimizer.get_lamb_coeffs() == []
    step(net, optimizer)
    assert all(ratio > 0 for ratio in optimizer.get_lamb_coeffs())
    _, loaded = new()
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.get_lamb_coeffs() == []
    net.bias.requires_grad_(False)
    step(net, optimizer)
    weight, bias = optimizer.get_lamb_coeffs()
    assert weight > 0
    assert math.isnan(bias)
