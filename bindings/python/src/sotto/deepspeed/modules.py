"""DeepSpeed's module paths: which of them is served by what here, and why the others are not.

``sotto.deepspeed.ops.adam`` and the rest of DeepSpeed's tree can be imported like DeepSpeed's own:
their names are those of the modules here that PATHS lists. A name that is DeepSpeed's and not here
is a class that raises UnsupportedError, with a hint, when it is made or called, so that programs
that only import it run.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

from ..errors import InvalidStateError, UnsupportedError

HERE = __name__.rpartition(".")[0]  # sotto.deepspeed
PIPE = "this engine runs no pipeline; keep DeepSpeed's, with optimizer_from_config() of each stage"
MOE = "mixtures of experts are averaged over other ranks than the rest; keep DeepSpeed for them"
INFERENCE = "inference is not here; call the module itself under torch.inference_mode()"
KERNELS = "kernels of the model have to be PyTorch's, for example scaled_dot_product_attention"
TUNING = "choose batch sizes in the configuration"
COMPRESS = "compression of the model is not here; use torch.ao"
PROFILE = "use torch.profiler"
TENSOR = "sharding layers is not here; keep Megatron's or DeepSpeed's and pass mpu= or comm="
WRITE = "write events with engine.monitor, or a writer of your own"
DATA = "give training_data in the order that is wanted, or a data_sampler to deepspeed_io()"
STAGE = "parameters and state are whole on every rank: only stage 0 is here"
OTHER = "it is not a part of sotto.deepspeed; keep DeepSpeed for it"
# Path below deepspeed: modules here that have its names, and the hint for the names that they lack.
PATHS: Mapping[str, tuple[Sequence[str], str]] = MappingProxyType(
    {
        "accelerator.real_accelerator": (["accelerator"], OTHER),
        "accelerator.abstract_accelerator": ([], OTHER),
        "autotuning": ([], TUNING),
        "checkpoint": ([], "use the engine's save_checkpoint() and load_checkpoint()"),
        "checkpoint.utils": (["weights"], "use the engine's save_checkpoint()"),
        "checkpointing": (["activations"], STAGE),
        "comm.comm": (["comm"], OTHER),
        "comm.torch": ([], "use torch.distributed"),
        "compile": ([], "use engine.compile(), which is torch.compile"),
        "compression": ([], COMPRESS),
        "compression.compress": ([], COMPRESS),
        "compression.helper": ([], COMPRESS),
        "constants": (["comm"], OTHER),
        "elasticity": ([], "restart with torchrun; checkpoints load on any number of ranks"),
        "env_report": ([], "use sotto.build_info()"),
        "git_version_info": ([], OTHER),
        "inference": ([], INFERENCE),
        "inference.config": ([], INFERENCE),
        "inference.engine": ([], INFERENCE),
        "inference.v2": ([], INFERENCE),
        "io": ([], OTHER),
        "launcher": ([], "start ranks with sotto-run or torchrun"),
        "launcher.runner": ([], "start ranks with sotto-run or torchrun"),
        "linear": ([], KERNELS),
        "model_implementations": ([], KERNELS),
        "module_inject": ([], KERNELS),
        "moe": ([], MOE),
        "moe.experts": ([], MOE),
        "moe.layer": ([], MOE),
        "moe.sharded_moe": ([], MOE),
        "moe.utils": ([], MOE),
        "monitor": (["monitors"], WRITE),
        "monitor.config": ([], WRITE),
        "monitor.csv_monitor": (["monitors"], WRITE),
        "monitor.monitor": (["monitors"], WRITE),
        "monitor.tensorboard": (["monitors"], WRITE),
        "nebula": ([], OTHER),
        "ops": (["optimizers"], KERNELS),
        "ops.adagrad": (["optimizers"], KERNELS),
        "ops.adam": (["optimizers"], KERNELS),
        "ops.adam.cpu_adam": (["optimizers"], KERNELS),
        "ops.adam.fused_adam": (["optimizers"], KERNELS),
        "ops.lamb": (["optimizers"], KERNELS),
        "ops.lamb.fused_lamb": (["optimizers"], KERNELS),
        "ops.lion": (["optimizers"], KERNELS),
        "ops.lion.cpu_lion": (["optimizers"], KERNELS),
        "ops.lion.fused_lion": (["optimizers"], KERNELS),
        "ops.op_builder": ([], KERNELS),
        "ops.sparse_attention": ([], KERNELS),
        "ops.transformer": ([], KERNELS),
        "ops.transformer.inference": ([], INFERENCE),
        "pipe": ([], PIPE),
        "profiling": ([], PROFILE),
        "profiling.flops_profiler": ([], PROFILE),
        "profiling.flops_profiler.profiler": ([], PROFILE),
        "runtime": ([], OTHER),
        "runtime.activation_checkpointing": (["activations"], STAGE),
        "runtime.activation_checkpointing.checkpointing": (["activations"], STAGE),
        "runtime.base_optimizer": ([], OTHER),
        "runtime.bf16_optimizer": ([], STAGE),
        "runtime.compiler": ([], OTHER),
        "runtime.config": ([], "use sotto.config_report(), which reads a whole configuration"),
        "runtime.constants": ([], OTHER),
        "runtime.data_pipeline": ([], DATA),
        "runtime.data_pipeline.data_sampling": ([], DATA),
        "runtime.data_pipeline.data_sampling.data_sampler": ([], DATA),
        "runtime.data_pipeline.data_sampling.indexed_dataset": ([], DATA),
        "runtime.data_pipeline.data_routing": ([], DATA),
        "runtime.data_pipeline.data_routing.helper": ([], DATA),
        "runtime.dataloader": (["loader"], DATA),
        "runtime.engine": (["_names"], OTHER),
        "runtime.fp16": ([], OTHER),
        "runtime.fp16.fused_optimizer": ([], STAGE),
        "runtime.fp16.unfused_optimizer": ([], STAGE),
        "runtime.fp16.loss_scaler": ([], "the loss scale is the library's: set fp16"),
        "runtime.fp16.onebit": (["optimizers"], OTHER),
        "runtime.fp16.onebit.adam": (["optimizers"], OTHER),
        "runtime.fp16.onebit.lamb": (["optimizers"], OTHER),
        "runtime.fp16.onebit.zoadam": (["optimizers"], OTHER),
        "runtime.hybrid_engine": ([], INFERENCE),
        "runtime.lr_schedules": (["lr_schedules"], OTHER),
        "runtime.pipe": ([], PIPE),
        "runtime.pipe.engine": ([], PIPE),
        "runtime.pipe.module": ([], PIPE),
        "runtime.pipe.topology": ([], PIPE),
        "runtime.sequence_parallel": ([], TENSOR),
        "runtime.sequence_parallel.ulysses_sp": ([], TENSOR),
        "runtime.sparse_tensor": ([], "gradients have to be dense"),
        "runtime.tensor_parallel": ([], TENSOR),
        "runtime.utils": (["logs", "weights"], OTHER),
        "runtime.zero": (["zero"], STAGE),
        "runtime.zero.config": ([], STAGE),
        "runtime.zero.linear": ([], STAGE),
        "runtime.zero.partition_parameters": (["zero"], STAGE),
        "runtime.zero.stage3": (["zero"], STAGE),
        "runtime.zero.stage_1_and_2": ([], STAGE),
        "runtime.zero.tiling": ([], STAGE),
        "runtime.zero.utils": ([], STAGE),
        "sequence": ([], TENSOR),
        "sequence.layer": ([], TENSOR),
        "utils": (["logs", "weights", "loader"], OTHER),
        "utils.bwc": ([], TENSOR),
        "utils.comms_logging": (["comm", "logs"], OTHER),
        "utils.groups": (["groups"], MOE),
        "utils.logging": (["logs"], OTHER),
        "utils.nvtx": (["logs"], OTHER),
        "utils.timer": (["meters"], PROFILE),
        "utils.torch": ([], OTHER),
        "utils.zero_to_fp32": (["weights"], STAGE),
    }
)


class Refused:
    """Base of what stands for a class or function of DeepSpeed's that is not here."""

    _what, _hint = "", ""

    def __new__(cls, *_: Any, **__: Any) -> NoReturn:
        """Errors: UnsupportedError, always."""
        raise UnsupportedError(f"{cls._what}: {cls._hint}")


def refused(what: str, hint: str) -> type[Refused]:
    """A class of this name that raises UnsupportedError when it is called."""
    return type(what.rpartition(".")[2], (Refused,), {"_what": what, "_hint": hint})


class _Path(ModuleType):
    """A module of PATHS."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{HERE}.{path}", f"deepspeed.{path}, served by sotto.deepspeed.")
        self._at = path
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        below = f"{self._at}.{name}"
        if below in PATHS:
            return importlib.import_module(f"{HERE}.{below}")
        served, hint = PATHS[self._at]
        for module in served:
            found = importlib.import_module(f"{HERE}.{module}")
            if hasattr(found, name):
                return getattr(found, name)
        made = refused(f"deepspeed.{below}", hint)
        setattr(self, name, made)
        return made


class _Loader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """A module of PATHS; None for a name of DeepSpeed's, which exec_module() replaces."""
        if spec.name.startswith(f"{HERE}."):
            return _Path(spec.name[len(HERE) + 1 :])
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module here in the place of DeepSpeed's name."""
        name = module.__name__
        if not name.startswith(f"{HERE}."):
            sys.modules[name] = importlib.import_module(HERE + name[len("deepspeed") :])


class _Finder(importlib.abc.MetaPathFinder):
    """Finds sotto.deepspeed.PATH; and deepspeed.PATH behind install_as_deepspeed()."""

    def __init__(self) -> None:
        self.installed = False

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for what is not in PATHS."""
        if fullname.startswith(f"{HERE}."):
            if fullname[len(HERE) + 1 :] not in PATHS:
                return None
        elif not self.installed or not fullname.startswith("deepspeed."):
            return None
        return importlib.machinery.ModuleSpec(fullname, _LOADER, is_package=True)


_LOADER, _FINDER = _Loader(), _Finder()


def register() -> None:
    """Makes the paths importable; for sotto.deepspeed."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def install_as_deepspeed() -> None:
    """From now on ``import deepspeed`` and ``from deepspeed.x import y`` mean sotto.deepspeed.

    In the whole process, so also in packages that use DeepSpeed where they find it. Call it before
    anything imports DeepSpeed. Errors: InvalidStateError (DeepSpeed is imported already).
    """
    there = sys.modules.get("deepspeed")
    here = sys.modules[HERE]
    if there not in (None, here):
        raise InvalidStateError(
            "install_as_deepspeed(): DeepSpeed itself is imported already, from "
            f"{getattr(there, '__file__', None)}; call it first"
        )
    sys.modules["deepspeed"] = here
    _FINDER.installed = True
