"""The engine: DeepSpeed's loop of forward, backward and step around a module."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError, UnsupportedError
from ..torch.base import SottoOptimizer
from ..torch.groups import broadcast_parameters, check_parameters
from . import checkpoint as files
from . import imported
from .comm import meet
from .config import Settings, pick
from .optimizer import ConfiguredOptimizer, named_groups, sections_of
from .schedule import ConfigSchedule

INITIAL = ("broadcast", "check", "trust")


class Engine(torch.nn.Module):
    """What :func:`initialize` returns first. Attributes that it lacks are the module's.

    ``engine(batch)`` is the module's forward pass; ``engine.backward(loss)`` and ``engine.step()``
    follow it for every micro-batch, and every gradient_accumulation_steps-th step() updates the
    parameters. Threads: one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: SottoOptimizer,
        lr_scheduler: Any,
        settings: Settings,
        comm: Comm,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.comm = comm
        self.config = settings.file
        self.device = torch.device("cpu")
        self.global_rank, self.dp_world_size = comm.rank, comm.size
        self.world_size = comm.size
        self.local_rank = int(os.environ.get("LOCAL_RANK", comm.rank))
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self.training_dataloader: DataLoader[Any] | None = None
        self._batch: Mapping[str, Any] | None = settings.report["batch"]
        scale = settings.report["loss_scale"]
        self._scaled, self._dynamic = scale is not None, scale is not None and "window" in scale
        self._cast_to = torch.float16 if settings.section("fp16").get("auto_cast") else None
        self._print_every = settings.file.get("steps_per_print") or 0
        self._drop_last = bool(settings.file.get("dataloader_drop_last", False))
        self._step_applied = False
        self._local = False  # inside no_sync()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if "module" in modules and hasattr(modules["module"], name):
                return getattr(modules["module"], name)
            raise

    # ---- batch arithmetic ------------------------------------------------------------------------

    def _batch_number(self, key: str) -> int:
        if self._batch is None:
            raise InvalidStateError(
                f"{key} is not known: the configuration has no train_batch_size and no "
                "train_micro_batch_size_per_gpu"
            )
        return int(self._batch[key])

    def train_batch_size(self) -> int:
        """Samples per update over all ranks. Errors: InvalidStateError (no batch keys)."""
        return self._batch_number("train_batch_size")

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and backward pass. Errors: InvalidStateError (no batch keys)."""
        return self._batch_number("train_micro_batch_size_per_gpu")

    def gradient_accumulation_steps(self) -> int:
        """Backward passes per update."""
        return 1 if self._batch is None else int(self._batch["gradient_accumulation_steps"])

    def get_batch_info(self) -> tuple[int, int, int]:
        """train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step() updates the parameters."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    # ---- training --------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass; with fp16.auto_cast floating-point inputs become float16."""
        if self._cast_to is not None:
            inputs, kwargs = _cast(inputs, self._cast_to), _cast(kwargs, self._cast_to)
        return self.module(*inputs, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Gradients of one micro-batch; nothing is sent.

        loss: a scalar, the mean over this rank's micro-batch. scale_wrt_gas: whether it still has
        to be divided by gradient_accumulation_steps. Returns the loss, divided so.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            raise InvalidArgumentError(
                f"loss has {loss.numel()} elements and requires_grad {loss.requires_grad}; "
                "a scalar that depends on the parameters is needed"
            )
        steps = self.gradient_accumulation_steps()
        factor = self.optimizer.loss_scale if self._scaled else 1.0
        if not scale_wrt_gas:
            factor *= steps  # step() takes the mean of the micro-batches
        (loss.float() * factor if factor != 1.0 else loss).backward(  # type: ignore[no-untyped-call]
            retain_graph=retain_graph
        )
        return loss / steps if scale_wrt_gas else loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Takes the micro-batch; at a boundary averages over ranks and updates. Collective.

        lr_kwargs: for a lr_scheduler of the caller. Errors: NonfiniteError (nothing was updated;
        with a dynamic loss scale the step is skipped instead), the comm's own.
        """
        if self._local:
            raise InvalidStateError("step() inside no_sync(): leave the block first")
        self._step_applied = False
        if self.is_gradient_accumulation_boundary():
            self._update(lr_kwargs)
        else:
            self.optimizer.accumulate()
            self.zero_grad()
        self.micro_steps += 1

    def _update(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        before = self.optimizer.info().step
        self.optimizer.step()
        self.zero_grad()
        info = self.optimizer.info()
        self._step_applied = info.step != before
        self.skipped_steps += not self._step_applied
        if self._step_applied and not isinstance(self.lr_scheduler, (ConfigSchedule, type(None))):
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.global_steps += 1
        if self._batch is not None:
            self.global_samples += self.train_batch_size()
        if self._print_every and self.global_steps % self._print_every == 0:
            self._print_progress()

    def _print_progress(self) -> None:
        if self.global_rank != 0:
            return
        momenta = [group.get("betas", 0.0) for group in self.optimizer.param_groups]
        print(
            f"[Rank 0] step={self.global_steps}, skipped={self.skipped_steps}, "
            f"lr={self.get_lr()}, mom={momenta}",
            flush=True,
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the block add up in the parameters' gradients; step() is refused.

        backward() never sends anything, so nothing else differs.
        """
        self._local = True
        try:
            yield
        finally:
            self._local = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters."""
        self.module.zero_grad(set_to_none)

    def was_step_applied(self) -> bool:
        """Whether the last step() updated the parameters."""
        return self._step_applied

    def get_lr(self) -> list[float]:
        """The learning rate of the next update, for each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float:
        """Norm of the last update's gradients before clipping; NaN where it was not computed."""
        return self.optimizer.info().grad_norm

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward pass; 1 without loss scaling."""
        return self.optimizer.loss_scale

    # ---- data ------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        data_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int = 0,
    ) -> DataLoader[Any]:
        """A loader of this rank's micro-batches: shuffled and shared out among the ranks.

        batch_size: None: train_micro_batch_size_per_gpu. data_sampler: None: torch's
        DistributedSampler over the data-parallel ranks; a dataset without length shares itself out.
        """
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            data_sampler = DistributedSampler(
                dataset, num_replicas=self.dp_world_size, rank=self.global_rank
            )
        return DataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=data_sampler,
            collate_fn=collate_fn,
            num_workers=num_local_io_workers,
            drop_last=self._drop_last,
        )

    # ---- checkpoints -----------------------------------------------------------------------------

    @property
    def _exact(self) -> bool:
        return self.optimizer._section.get("checkpoint") == "exact"

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Writes a checkpoint; every rank has to call it.

        tag: name of the folder, the same on all ranks; None: global_stepN. client_state: plain
        values and tensors, which load_checkpoint() gives back. save_latest: whether "latest" names
        it. Returns True. Errors: InvalidArgumentError (client_state), OSError on the rank that
        meets it, SottoError on the others; "latest" then names the one before.
        """
        client_state = dict(client_state or {})
        folder = Path(save_dir) / str(f"global_step{self.global_steps}" if tag is None else tag)

        def prepare() -> None:
            files.check_plain(client_state, "client_state")
            if self.global_rank == 0:
                folder.mkdir(parents=True, exist_ok=True)

        files.together(self.comm, "making the checkpoint's folder", prepare)
        # collective: the mean of the error feedback loads on any number of ranks
        optimizer = self.optimizer.state_dict() if self._exact else self.optimizer.gather_state()

        def save() -> None:
            if self._exact:
                files.write(folder / files.rank_file(self.global_rank), {"optimizer": optimizer})
            if self.global_rank == 0:
                files.write(folder / files.MODEL_FILE, self._state(optimizer, client_state))

        files.together(self.comm, "writing the checkpoint", save)
        if save_latest and self.global_rank == 0:
            files.write_text(Path(save_dir) / "latest", folder.name)
        self.comm.barrier().wait()
        return True

    def _state(self, optimizer: dict[str, Any], client_state: Mapping[str, Any]) -> dict[str, Any]:
        schedule = self.lr_scheduler
        return {
            "module": self.module.state_dict(),
            "optimizer": None if self._exact else optimizer,
            "lr_scheduler": None if schedule is None else schedule.state_dict(),
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "micro_steps": self.micro_steps,
            "dp_world_size": self.dp_world_size,
            "ds_config": self.config,
            "client_state": dict(client_state),
        }

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Reads what save_checkpoint() wrote, here or in DeepSpeed; every rank has to call it.

        Of DeepSpeed: checkpoints without ZeRO; error feedback starts at zero, since they have that
        of rank 0 alone.

        tag: None: what "latest" names; where there is none, a warning and (None, None).
        load_optimizer_states False, or load_module_only: the optimizer starts anew.
        Returns the file's path and client_state. Errors: OSError, InvalidArgumentError (another
        model or optimizer; exact states of another number of ranks).
        """
        if tag is None:
            latest = Path(load_dir) / "latest"
            if not latest.is_file():
                warnings.warn(f"{latest} does not exist: no checkpoint was loaded", stacklevel=2)
                return None, None
            tag = latest.read_text(encoding="utf-8").strip()
        path = Path(load_dir) / str(tag) / files.MODEL_FILE
        whole = load_optimizer_states and not load_module_only
        if whole and not load_lr_scheduler_states and isinstance(self.lr_scheduler, ConfigSchedule):
            raise UnsupportedError(
                "load_lr_scheduler_states=False: the position in the configuration's schedule is "
                "part of the optimizer's state; use load_optimizer_states=False as well, or a "
                "lr_scheduler of your own"
            )
        state: dict[str, Any] = {}

        def load() -> None:
            state.update(files.read(path))
            if whole and state["optimizer"] is None and not imported.is_deepspeeds(state):
                state.update(files.read(path.with_name(files.rank_file(self.global_rank))))
            self.module.load_state_dict(state["module"], strict=load_module_strict)

        files.together(self.comm, "reading the checkpoint", load)
        if not whole:
            self.optimizer.close()
        elif imported.is_deepspeeds(state):
            self._import(state)
        else:
            self.optimizer.load_state_dict(state["optimizer"])  # collective
        if not load_module_only:
            self._restore(state, load_lr_scheduler_states)
        if imported.is_deepspeeds(state):
            return str(path), imported.client_state_of(state)
        return str(path), state["client_state"]

    def _import(self, state: Mapping[str, Any]) -> None:
        optimizer = self.optimizer
        names: list[list[str]] = [[] for _ in optimizer.param_groups]
        for name, group, _ in optimizer._registered():
            names[group].append(name)
        arrays = imported.arrays_of(state, names, scaled=self._dynamic)
        optimizer.import_arrays(arrays)  # collective

    def _restore(self, state: Mapping[str, Any], schedule: bool) -> None:
        for name in ("global_steps", "global_samples", "skipped_steps"):
            setattr(self, name, state[name])
        steps = self.global_steps * self.gradient_accumulation_steps()
        self.micro_steps = state.get("micro_steps", steps)
        saved = state["lr_scheduler"]
        if schedule and self.lr_scheduler is not None and saved is not None:
            self.lr_scheduler.load_state_dict(saved)

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin"
    ) -> bool:
        """Rank 0 writes the module's state_dict() alone. Every rank has to call it."""
        path = Path(save_dir) / save_filename

        def save() -> None:
            if self.global_rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write(path, self.module.state_dict())

        files.together(self.comm, "writing the model", save)
        return True

    def close(self) -> None:
        """Gives the library's optimizer back; call it before the comm's close()."""
        self.optimizer.close()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in nested lists and dicts as `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(
            f"model is of type {type(model).__qualname__}; a torch.nn.Module is needed"
        )
    kinds = [kind.__name__ for kind in type(model).__mro__]
    if "PipelineModule" in kinds:
        raise UnsupportedError(
            "model is a PipelineModule: this engine runs no pipeline. Let DeepSpeed's run it, with "
            "optimizer_from_config(stage, config, comm=...) on the data-parallel ranks of each "
            "stage"
        )
    if "DistributedDataParallel" in kinds:
        raise InvalidArgumentError(
            "model is wrapped in DistributedDataParallel, which would average the gradients a "
            "second time; pass the module inside, model.module"
        )


def _optimizer_of(
    given: Any, model: torch.nn.Module, params: Any, settings: Settings, comm: Comm
) -> SottoOptimizer:
    """The file's optimizer, or the caller's with what else the file says."""
    if given is None:
        return ConfiguredOptimizer(named_groups(model, params), settings, comm)
    if not isinstance(given, SottoOptimizer) and callable(given):
        given = given(list(model.parameters()) if params is None else params)
    if not isinstance(given, SottoOptimizer):
        raise InvalidArgumentError(
            f"optimizer is of type {type(given).__qualname__}; it has to be one of sotto.torch, "
            "which average gradients themselves, or a function that makes one of the parameters"
        )
    if given._comm is not comm:
        raise InvalidArgumentError("optimizer was made with another comm than the engine's")
    given.use_sections(sections_of(settings))
    return given


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    mpu: Any = None,
    collate_fn: Callable[[Any], Any] | None = None,
    config: Any = None,
    config_params: Any = None,
    *,
    comm: Comm | None = None,
    auto: Any = None,
    initial_parameters: str = "broadcast",
) -> tuple[Engine, SottoOptimizer, DataLoader[Any] | None, Any]:
    """An engine for a model and a DeepSpeed configuration. Collective.

    Returns (engine, optimizer, dataloader, lr_scheduler), as deepspeed.initialize does.

    args:               an object whose deepspeed_config is the configuration's path; in place of
                        config
    model:              a module in host memory; becomes float16 or bfloat16 as the file says
    optimizer:          None: the file's; one of sotto.torch, or a function of the parameters that
                        makes one, in place of it
    model_parameters:   None: all; tensors, or groups with values of their own
    training_data:      a dataset; its loader is the third result
    lr_scheduler:       a torch scheduler of `optimizer`, or a function that makes one of the
                        optimizer; in place of the file's
    mpu:                get_data_parallel_group() names the ranks that average
    config:             a dict, a path, or JSON text; config_params is its old name
    comm:               the ranks that average; None: mpu's, else the default comm, else those of
                        torch's process group, if it is initialised, else the launcher's
    auto:               what takes the place of values "auto": a dict by path,
                        {"optimizer.params.lr": 1e-3}, or an object with the attributes of
                        transformers.TrainingArguments
    initial_parameters: "broadcast": those of rank 0, and buffers, become everybody's; "check":
                        they are compared by hash, a difference is an error; "trust": neither

    Errors: InvalidArgumentError (names the key; ranks that contradict the batch keys),
    UnsupportedError (ZeRO stages above 0, pipelines), InvalidStateError (other parameters on other
    ranks), those of the comm.
    """
    _check_model(model)
    assert model is not None
    if initial_parameters not in INITIAL:
        raise InvalidArgumentError(
            f"initial_parameters is {initial_parameters!r}; allowed: {', '.join(INITIAL)}"
        )
    config = pick(args, config, config_params)
    chosen = comm is not None or mpu is not None
    comm = meet(comm, mpu)
    settings = Settings(config, auto, comm.size)
    settings.check_groups(chosen)
    if lr_scheduler is not None:
        settings.file.pop("scheduler", None)
        settings = Settings(settings.file, None, comm.size)
    if optimizer is None:
        settings.check()
    if settings.fp16 or settings.bf16:
        model.to(torch.float16 if settings.fp16 else torch.bfloat16)
    if initial_parameters == "broadcast":
        broadcast_parameters(model, comm=comm)
    elif initial_parameters == "check":
        check_parameters(model, comm=comm)
    made = _optimizer_of(optimizer, model, model_parameters, settings, comm)
    if lr_scheduler is None:
        kind = settings.report["schedule"]["type"]
        lr_scheduler = None if kind == "none" else ConfigSchedule(made, kind)
    elif not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(made)
    engine = Engine(model, made, lr_scheduler, settings, comm)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, made, engine.training_dataloader, lr_scheduler
