"""The engine: DeepSpeed's loop of forward, backward and step around a module."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from .._text import counted
from ..comm import Comm
from ..errors import InvalidArgumentError, InvalidStateError, NonfiniteError
from ..torch.base import SottoOptimizer
from ..torch.overlap import Overlap
from . import ranks
from .accelerator import get_accelerator
from .client import ClientOptimizer
from .config import Settings
from .loader import DeepSpeedDataLoader, sampler_of
from .logs import log_dist
from .loss_factor import LossFactor
from .members import member, refuse, value_at
from .recording import Recording
from .saving import Saving
from .schedule import ConfigSchedule
from .weights import cast


class Engine(Saving, Recording, torch.nn.Module):
    """What :func:`initialize` returns first. Attributes that it lacks are the module's.

    ``engine(batch)`` is the module's forward pass; ``engine.backward(loss)`` and ``engine.step()``
    follow it for every micro-batch, and every gradient_accumulation_steps-th step() updates the
    parameters. Threads: one.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        settings: Settings,
        comm: Comm,
        **given: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.basic_optimizer = getattr(optimizer, "optimizer", optimizer)
        self.lr_scheduler = lr_scheduler
        self.comm = comm
        self.config = settings.file
        self._config = types.SimpleNamespace(**settings.file)
        self.device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.global_rank, self.world_size = ranks.among_all(comm, given.get("mpu"))
        self.dp_world_size = self.seq_dp_world_size = comm.size
        self.local_rank = ranks.local_rank(comm.rank)
        self.dist_backend = get_accelerator().communication_backend_name()
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.gas_boundary_ctr = 0
        self.client_optimizer: Any = None
        self.client_lr_scheduler: Any = None
        self.training_data: Any = None
        self.collate_fn: Callable[[Any], Any] | None = None
        self.mpu: Any = None
        self.data_parallel_group: Any = None
        for name, value in given.items():
            setattr(self, name, value)
        self.seq_data_parallel_group = self.data_parallel_group
        self.param_names = {p: name for name, p in module.named_parameters()}
        self.training_dataloader: DataLoader[Any] | None = None
        self._batch: dict[str, Any] | None = settings.report["batch"]
        self._adds = self.gradient_accumulation_steps()  # what the library's part was told
        self._settings = settings
        scale = settings.report["loss_scale"]
        self._scaled, self._dynamic = scale is not None, scale is not None and "window" in scale
        self._cast_to = torch.float16 if settings.section("fp16").get("auto_cast") else None
        self._autocast = settings.autocast
        self._overlap: Overlap | None = None  # from the first backward() on
        self._overlaps = settings.section("sotto").get("overlap") is not None
        if self._overlaps and not isinstance(optimizer, SottoOptimizer):
            refuse(
                'the key "sotto": {"overlap"} with an optimizer of the program\'s own',
                "describe the optimizer in the configuration, or leave the key out",
            )
        self._step_applied = False
        self._boundary: bool | None = None  # what set_gradient_accumulation_boundary() said
        self._taken = 0  # micro-batches of the next update that the library has
        self._loss_factor = LossFactor(module, lambda: self._factor(scale_wrt_gas=True))
        self._compiled = False
        self.inside_no_sync_ctxt = False
        self.scale_wrt_gas: bool | None = None
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None
        self.save_non_zero_checkpoint = comm.rank == 0
        self._start_recording(settings.file, 0 if self._batch is None else self.train_batch_size())
        self._publish()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            modules = self.__dict__.get("_modules", {})
            if name.startswith("__") or "module" not in modules:
                raise
            known, value = member(name, self.__dict__.get("config", {}))
            if known:
                return value
            if hasattr(modules["module"], name):
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

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes gradient_accumulation_steps, so that an update has as many samples.

        Between updates alone, on all ranks alike. Errors: InvalidArgumentError (no multiple of the
        micro-batches of all ranks).
        """
        once = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % once:
            raise InvalidArgumentError(
                f"train_batch_size is {train_batch_size}; allowed: multiples of {once}, "
                "train_micro_batch_size_per_gpu on all ranks"
            )
        self._between_updates("set_train_batch_size()")
        self._change_batch(train_batch_size=train_batch_size)
        self._change_batch(gradient_accumulation_steps=train_batch_size // once)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples of a backward pass; gradient_accumulation_steps stay."""
        if micro_batch_size <= 0:
            raise InvalidArgumentError(f"micro_batch_size is {micro_batch_size}; allowed: from 1")
        whole = micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size
        self._batch_number("train_batch_size")
        self._change_batch(train_micro_batch_size_per_gpu=micro_batch_size, train_batch_size=whole)

    def _change_batch(self, **values: int) -> None:
        self._batch = {**(self._batch or {}), **values}

    def _between_updates(self, what: str) -> None:
        if self._taken:
            raise InvalidStateError(
                f"{what}: {self._taken} of {self.gradient_accumulation_steps()} micro-batches of "
                "the next update are done; call it behind the step() that updates, of which "
                "is_gradient_accumulation_boundary() tells before"
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step() updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Says whether the next step() updates, from now on; None: by counting again.

        For loops that call step() for the last micro-batch alone: gradients then add up in the
        parameters. Between updates, or with what counting says.
        Errors: InvalidStateError.
        """
        if self._taken and is_boundary != self.is_gradient_accumulation_boundary():
            self._between_updates("set_gradient_accumulation_boundary()")
        if self._taken == 0:
            self._boundary = is_boundary

    # ---- training --------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward pass, under torch.autocast with torch_autocast.

        With fp16.auto_cast floating-point inputs become float16.
        """
        if self._cast_to is not None:
            inputs, kwargs = cast(inputs, self._cast_to), cast(kwargs, self._cast_to)
        self.tput_timer.start()
        with self._timed("forward"), contextlib.ExitStack() as stack:
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, self._autocast))
            return self.module(*inputs, **kwargs)

    def _need_optimizer(self, what: str) -> Any:
        if self.optimizer is None:
            raise InvalidStateError(
                f"{what}: the engine has no optimizer: the key optimizer is missing in the "
                "configuration, and none was passed to initialize()"
            )
        return self.optimizer

    @property
    def _library_adds(self) -> bool:
        """Whether micro-batches add up in the library, in float32, not in the parameters' grad."""
        return self._boundary is None and self.gradient_accumulation_steps() == self._adds

    def _factor(self, scale_wrt_gas: bool) -> float:
        """What the loss is multiplied with: the update takes the sum over micro-batches / steps."""
        steps = self.gradient_accumulation_steps()
        factor = self.optimizer.loss_scale if self._scaled else 1.0
        if self._library_adds:  # which takes the mean
            return float(factor if scale_wrt_gas else factor * steps)
        return float(factor / steps if scale_wrt_gas else factor)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Gradients of one micro-batch; nothing is sent, but with "sotto": {"overlap"}.

        With that the last micro-batch of an update begins its step: gradients are sent as soon as
        they are there, and step() waits for the update.

        p.grad then is this rank's, times the loss scale: of this micro-batch alone, undivided,
        until step() takes it; or, if the program sets boundaries or has changed the batch size, the
        sum of those since the last update / gradient_accumulation_steps, as in DeepSpeed.

        loss: a scalar, the mean over this rank's micro-batch. scale_wrt_gas: whether it still has
        to be divided by gradient_accumulation_steps. Returns the loss, divided so.
        """
        with self._timed("backward"), self._timed("backward_inner"):
            self.scale(loss, scale_wrt_gas).backward(  # type: ignore[no-untyped-call]
                retain_graph=retain_graph
            )
        return loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss

    def scale(self, loss: torch.Tensor, scale_wrt_gas: bool = True) -> torch.Tensor:
        """The loss as backward() differentiates it, for programs that call its backward()."""
        self._need_optimizer("backward()")
        if loss.numel() != 1 or not loss.requires_grad:
            raise InvalidArgumentError(
                f"loss has {counted(loss.numel(), 'element')} and requires_grad "
                f"{loss.requires_grad}; a scalar that depends on the parameters is needed"
            )
        factor = self._factor(scale_wrt_gas)
        self._start_overlap()
        self._loss_factor.multiplied()
        return loss.float() * factor if factor != 1.0 else loss

    def _start_overlap(self) -> None:
        """Collective at the first call."""
        if not self._overlaps or self._overlap is not None:
            return
        chosen = self._settings.section("sotto")["overlap"].get("unused")
        self._overlap = Overlap(self.module, optimizer=self.optimizer, unused=chosen or "zero")
        self._overlap._may_begin = lambda: (
            self.is_gradient_accumulation_boundary()
            and not self.inside_no_sync_ctxt
            and self._loss_factor.was_multiplied()
        )

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Takes the micro-batch; at a boundary averages over ranks and updates. Collective.

        A parameter that backward() has not reached on this rank has a gradient of zeros.
        lr_kwargs: for a lr_scheduler of the caller. Errors: NonfiniteError (nothing was updated;
        with a loss scale the step is skipped instead, but for a static one with 0/1 Adam or an
        overlap), InvalidStateError (gradients of a loss that scale() was due for and not called),
        the comm's own.
        """
        optimizer = self._need_optimizer("step()")
        if self.inside_no_sync_ctxt:
            raise InvalidStateError("step() inside no_sync(): leave the block first")
        self._loss_factor.check()
        self._step_applied = False
        boundary = self.is_gradient_accumulation_boundary()
        with self._timed("step"):
            if boundary:
                self._update(lr_kwargs)
            elif self._library_adds:
                optimizer.accumulate()
                self._taken += 1
                self.zero_grad()
        self._record_step(boundary)
        self.micro_steps += 1
        self.tput_timer.stop(global_step=self._step_applied)

    def _update(self, lr_kwargs: Mapping[str, Any] | None) -> None:
        if isinstance(self.optimizer, ClientOptimizer):
            self.optimizer.take_new()
        overlap = self._overlap
        begun = overlap is not None and overlap._begun()
        before = overlap._steps_before if begun and overlap else self.optimizer.info().step
        if not begun and isinstance(self.optimizer, SottoOptimizer):
            self.optimizer._fill_gradients()
        try:
            self.optimizer.step()
        except NonfiniteError as error:
            if not self._skips_overflows() or begun:
                raise
            log_dist(f"step skipped, the loss scale is static: {error}", [self.global_rank])
        self._taken = 0
        self.zero_grad()
        info = self.optimizer.info()
        self._step_applied = info.step != before
        self.skipped_steps += not self._step_applied
        if self._step_applied and not isinstance(self.lr_scheduler, (ConfigSchedule, type(None))):
            self._step_schedule(lr_kwargs or {})
        self.global_steps += 1
        self.gas_boundary_ctr += 1
        if self._batch is not None:
            self.global_samples += self.train_batch_size()
        self._publish()
        every = self.config.get("steps_per_print")
        if every and self.global_steps % every == 0:
            self._print_progress()

    def _skips_overflows(self) -> bool:
        """Whether the loss scale is static, and what is not finite is an error of all ranks."""
        local = getattr(self.optimizer, "_kind", None) == "ZeroOneAdam"
        return self._scaled and not self._dynamic and not local

    def _step_schedule(self, lr_kwargs: Mapping[str, Any]) -> None:
        try:
            self.lr_scheduler.step(**lr_kwargs)
        except TypeError:
            if lr_kwargs or self._batch is None:
                raise
            self.lr_scheduler.step(self.train_batch_size())  # as Megatron's schedules want it

    def _publish(self) -> None:
        """What programs read of DeepSpeed's 16-bit wrappers stands at the optimizer too."""
        if self.optimizer is not None:
            self.optimizer.overflow = self.global_steps > 0 and not self._step_applied
            self.optimizer.cur_scale = self.optimizer.loss_scale

    def _print_progress(self) -> None:
        if self.global_rank != 0:
            return
        print(
            f"[Rank 0] step={self.global_steps}, skipped={self.skipped_steps}, "
            f"lr={self.get_lr()}, mom={self.get_mom()}",
            flush=True,
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in the block add up in the parameters' gradients; step() is refused.

        backward() never sends anything, so nothing else differs. Errors: InvalidStateError (inside
        such a block).
        """
        if self.inside_no_sync_ctxt:
            raise InvalidStateError("no_sync() inside no_sync(): leave the block first")
        self.inside_no_sync_ctxt = True
        try:
            yield
        finally:
            self.inside_no_sync_ctxt = False

    def allreduce_gradients(self, bucket_size: int = 500000000) -> None:
        """Nothing: step() averages. For loops that call it between backward() and step()."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all parameters."""
        self._loss_factor.cleared()
        self.module.zero_grad(set_to_none)

    def compile(
        self,
        backend: Any = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compiles the module with torch.compile.

        backend: None: the accelerator's. Errors: UnsupportedError (schedule: passes of DeepSpeed's
        own compiler; compiled_autograd_enabled).
        """
        if schedule is not None or compiled_autograd_enabled:
            refuse("engine.compile(schedule=, compiled_autograd_enabled=)", "leave them out")
        chosen = backend or get_accelerator().get_compile_backend()
        self.module.compile(backend=chosen, **dict(compile_kwargs or {}))
        self._compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether compile() was called."""
        return self._compiled

    # ---- figures ---------------------------------------------------------------------------------

    def was_step_applied(self) -> bool:
        """Whether the last step() updated the parameters."""
        return self._step_applied

    def get_lr(self) -> list[float]:
        """The learning rate of the next update, for each group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Betas of each group, or the momentum."""
        groups = self._need_optimizer("get_mom()").param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_type(self) -> list[Any]:
        """ "type" of each group, as programs set it."""
        return self._of_groups("type")

    def _of_groups(self, key: str) -> list[Any]:
        groups = self._need_optimizer(f"{key} of the groups").param_groups
        return [group.get(key, 0.0) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last update's gradients before clipping; NaN where it was not computed.

        None before the first update.
        """
        if self.global_steps == 0:
            return None
        return float(self._need_optimizer("get_global_grad_norm()").info().grad_norm)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all groups; a schedule of the configuration is overridden."""
        for group in self._need_optimizer("set_lr()").param_groups:
            group["lr"] = lr

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward pass; 1 without loss scaling."""
        return 1.0 if self.optimizer is None else float(self.optimizer.loss_scale)

    def get_compile_time(self) -> float:
        """Always 0: torch.compile's own figures have it."""
        return 0.0

    def get_data_parallel_rank(self) -> int:
        """This rank among those that average."""
        return self.comm.rank

    # ---- what the configuration says -------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        """Whether parameters are float16, by the configuration."""
        return self._settings.fp16

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bfloat16, by the configuration."""
        return self._settings.bf16

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """In which type torch.autocast runs the forward pass; None: not at all."""
        return self._autocast

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Of parameters, and of gradients."""
        model = torch.bfloat16 if self._settings.bf16 else torch.float32
        model = torch.float16 if self._settings.fp16 else model
        named = value_at(self.config, "data_types.grad_accum_dtype", None)
        kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        return model, kinds.get(str(named).lower(), model)

    @property
    def communication_data_type(self) -> torch.dtype:
        """In which type averages travel in full precision."""
        named = self.config.get("communication_data_type")
        kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        return kinds.get(str(named).lower(), self.get_data_types()[1])

    def loss_scale(self) -> float:
        """fp16.loss_scale: 0 is dynamic. The scale in force is cur_scale."""
        return float(value_at(self.config, "fp16.loss_scale", 0.0))

    def dynamic_loss_scale(self) -> bool:
        """Whether fp16.loss_scale is 0."""
        return self.loss_scale() == 0

    def initial_dynamic_scale(self) -> float:
        """The first dynamic scale."""
        return float(2 ** value_at(self.config, "fp16.initial_scale_power", 16))

    def dynamic_loss_scale_args(self) -> dict[str, Any] | None:
        """How a dynamic scale changes."""
        scale = self._settings.report["loss_scale"]
        if not self._dynamic:
            return None
        return {
            "init_scale": scale["first_scale"],
            "scale_window": scale["window"],
            "min_scale": scale["smallest_scale"],
        }

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided behind the sum."""
        return not self.config.get("prescale_gradients", False)

    def optimizer_name(self) -> str | None:
        """The client's class, or the configuration's type."""
        if isinstance(self.optimizer, ClientOptimizer) or self.client_optimizer is not None:
            return type(self.basic_optimizer).__name__
        kind: str | None = self._settings.section("optimizer").get("type")
        return None if kind is None else kind.lower()

    def optimizer_params(self) -> dict[str, Any] | None:
        """Of the configuration."""
        return self._settings.section("optimizer").get("params")

    def scheduler_name(self) -> str | None:
        """Of the configuration."""
        return self._settings.section("scheduler").get("type")

    def scheduler_params(self) -> dict[str, Any] | None:
        """Of the configuration."""
        return self._settings.section("scheduler").get("params")

    # ---- data ------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = False,
        data_sampler: Any = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader of this rank's micro-batches: shared out among the ranks.

        batch_size: None: train_micro_batch_size_per_gpu. route: "train" shuffles, "eval" and
        "predict" do not. data_sampler: None: torch's DistributedSampler over the data-parallel
        ranks; a dataset without length shares itself out. collate_fn: None: that of initialize().
        """
        if route not in ("train", "eval", "predict"):
            raise InvalidArgumentError(f"route is {route!r}; allowed: train, eval, predict")
        if data_sampler is None:
            data_sampler = sampler_of(
                dataset, self.dp_world_size, self.comm.rank, shuffle=route == "train"
            )
        return DeepSpeedDataLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory and self.device.type == "cuda",
            drop_last=bool(self.config.get("dataloader_drop_last", False)),
        )

    @staticmethod
    def is_map_style_dataset(obj: Any) -> bool:
        """Whether a dataset has items and a length."""
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj: Any) -> bool:
        """Whether a dataset is one of torch's that are only walked through."""
        return isinstance(obj, torch.utils.data.IterableDataset)

    def set_data_post_process_func(self, post_process_func: Callable[[Any, Any], Any]) -> None:
        """A function of every batch of training_dataloader, whose result takes its place."""
        if isinstance(self.training_dataloader, DeepSpeedDataLoader):
            self.training_dataloader.post_process_func = post_process_func

    def empty_partition_cache(self) -> None:
        """Nothing is cached: parameters are whole."""

    # ---- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives the library's optimizer back; call it before the comm's close()."""
        if self._overlap is not None:
            self._overlap.close()
        if self.optimizer is not None:
            self.optimizer.close()

    def destroy(self) -> None:
        """As close()."""
        self.close()
