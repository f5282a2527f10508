"""The engine's checkpoints."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidArgumentError
from . import files, imported, kept
from .client import ClientOptimizer
from .schedule import ConfigSchedule

if TYPE_CHECKING:
    from ..comm import Comm

LoadFn = Callable[..., Any]


class Saving:
    """The part of Engine that writes and reads files."""

    if TYPE_CHECKING:
        module: torch.nn.Module
        optimizer: Any
        lr_scheduler: Any
        comm: Comm
        config: dict[str, Any]
        mpu: Any
        dp_world_size: int
        global_steps: int
        global_samples: int
        skipped_steps: int
        micro_steps: int
        loaded_checkpoint_dp_world_size: int | None
        loaded_checkpoint_mp_world_size: int | None
        _dynamic: bool
        _taken: int

        def gradient_accumulation_steps(self) -> int:  # noqa: D102
            ...

        def zero_grad(self) -> None:  # noqa: D102
            ...

    @property
    def _exact(self) -> bool:
        return getattr(self.optimizer, "_policy", None) == "exact"

    def _of_mpu(self, name: str, default: int) -> int:
        return int(getattr(self.mpu, name, lambda: default)())

    @property
    def _shard(self) -> int:
        """The model-parallel rank: shards are saved beside each other."""
        whole = self._of_mpu("get_model_parallel_rank", 0)
        return self._of_mpu("get_tensor_model_parallel_rank", whole)

    def _check_tag(self, tag: str) -> None:
        """Errors: InvalidArgumentError on every rank, if tags differ."""
        mine = torch.tensor([zlib.crc32(tag.encode())], dtype=torch.int64)
        everybody = torch.empty(self.comm.size, dtype=torch.int64)
        self.comm.all_gather(mine, everybody).wait()
        others = (everybody != everybody[0]).nonzero().flatten().tolist()
        if others:
            raise InvalidArgumentError(
                f"save_checkpoint: tag is {tag!r} on rank {self.comm.rank}, and that of rank "
                f"{others[0]} is not that of rank 0; all ranks need the same"
            )

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes a checkpoint; every rank has to call it.

        Micro-batches of the next update are no part of it, as in DeepSpeed.

        save_dir: may be on a disk of each machine's own: load_checkpoint() needs what rank 0 wrote,
        and with "sotto": {"checkpoint": "exact"} this rank's file beside it.
        tag: name of the folder, the same on all ranks; None: global_stepN. client_state:
        load_checkpoint() gives that of rank 0 back. It, states of schedules and get_extra_state()
        may have plain values, tensors, numpy arrays, argparse's namespaces, and what
        torch.serialization.add_safe_globals() allows.
        save_latest: whether "latest" names it. exclude_frozen_parameters: leaves out parameters
        that require no gradient; load with load_module_strict=False then. Returns True. Errors:
        InvalidArgumentError (ranks with other tags), and on the rank that meets it OSError or
        InvalidArgumentError (names the part of the state that could not be loaded), SottoError on
        the others; "latest" then names the one before.
        """
        client_state = dict(client_state or {})
        name = str(f"global_step{self.global_steps}" if tag is None else tag)
        folder = Path(save_dir) / name

        def prepare() -> None:
            if self.comm.rank == 0 or self._exact:
                folder.mkdir(parents=True, exist_ok=True)

        self._check_tag(name)
        files.together(self.comm, "making the checkpoint's folder", prepare)
        optimizer = self._optimizer_state()

        def save() -> None:
            if self._exact:
                rank_file = files.rank_file(self.comm.rank, self._shard)
                files.write(folder / rank_file, {"optimizer": optimizer})
            if self.comm.rank == 0:
                state = self._state(optimizer, client_state, exclude_frozen_parameters)
                files.write(folder / files.model_file(self._shard), state)

        files.together(self.comm, "writing the checkpoint", save)
        if save_latest and self.comm.rank == 0:
            files.write_text(Path(save_dir) / "latest", name)
        self.comm.barrier().wait()
        return True

    def _optimizer_state(self) -> dict[str, Any] | None:
        """Of this rank, if exact; else the same on all. Collective."""
        if self.optimizer is None:
            return None
        gather = None if self._exact else getattr(self.optimizer, "gather_state", None)
        state: dict[str, Any] = self.optimizer.state_dict() if gather is None else gather()
        return state

    def _state(
        self, optimizer: dict[str, Any] | None, client_state: Mapping[str, Any], less: bool
    ) -> dict[str, Any]:
        schedule = self.lr_scheduler
        return {
            "module": self.module_state_dict(exclude_frozen_parameters=less),
            "optimizer": None if self._exact else optimizer,
            "lr_scheduler": None if schedule is None else schedule.state_dict(),
            "global_steps": self.global_steps,
            "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps,
            "micro_steps": self.micro_steps,
            "dp_world_size": self.dp_world_size,
            "mp_world_size": self._of_mpu("get_model_parallel_world_size", 1),
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
        custom_load_fn: LoadFn | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Reads what save_checkpoint() wrote, here or in DeepSpeed; every rank has to call it.

        Of DeepSpeed: checkpoints without ZeRO; error feedback starts at zero, since they have that
        of rank 0 alone.

        tag: None: what "latest" names; where there is none, a warning and (None, None).
        load_optimizer_states False, or load_module_only: the optimizer goes on with the moments and
        step number that it has; outer steps, and 0/1 Adam with a frozen variance, start anew.
        Micro-batches of the next update are dropped.
        load_lr_scheduler_states False: the schedule goes on from where this engine's is; with the
        optimizer's states the next update has the saved rate still.
        custom_load_fn: called as custom_load_fn(src=state_dict, dst=module) in place of
        load_state_dict(). Returns the file's path and client_state. Errors: OSError,
        InvalidArgumentError (another model or optimizer; exact states of another number of ranks),
        what custom_load_fn raises.
        """
        if tag is None:
            latest = Path(load_dir) / "latest"
            if not latest.is_file():
                warnings.warn(f"{latest} does not exist: no checkpoint was loaded", stacklevel=2)
                return None, None
            tag = latest.read_text(encoding="utf-8").strip()
        path = Path(load_dir) / str(tag) / files.model_file(self._shard)
        whole = self.optimizer is not None and load_optimizer_states and not load_module_only
        state: dict[str, Any] = {}

        def load() -> None:
            state.update(files.read(path))
            if whole and state["optimizer"] is None and not imported.is_deepspeeds(state):
                rank_file = path.with_name(files.rank_file(self.comm.rank, self._shard))
                if not rank_file.is_file() and not list(path.parent.glob(files.RANK_FILES)):
                    raise InvalidArgumentError(
                        f"{path} has no optimizer's state: its engine had none; load it with "
                        "load_optimizer_states=False"
                    )
                state.update(files.read(rank_file))
            self.load_module_state_dict(state, load_module_strict, custom_load_fn)

        if self._taken and not whole:
            kept.drop_micro_batches(self.optimizer)
            self._drop_micro_batches()
        files.together(self.comm, "reading the checkpoint", load)
        self._drop_micro_batches()
        if whole:
            schedule = None if load_lr_scheduler_states else self.lr_scheduler
            mine = schedule if isinstance(schedule, ConfigSchedule) else None
            position = -1 if mine is None else mine.last_batch_iteration
            self._load_optimizer(state)
            if mine is not None:
                mine.go_on_behind(position)
        elif self.optimizer is not None:
            kept.follow(self.optimizer)
        if not load_module_only:
            self._restore(state, load_lr_scheduler_states)
        if self.optimizer is not None:
            self.optimizer.cur_scale = self.optimizer.loss_scale
        if imported.is_deepspeeds(state):
            return str(path), imported.client_state_of(state)
        return str(path), state["client_state"]

    def _drop_micro_batches(self) -> None:
        """Of the next update, which were computed with other parameters."""
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        self._taken = 0
        self.zero_grad()

    def _load_optimizer(self, state: Mapping[str, Any]) -> None:
        if not imported.is_deepspeeds(state):
            self.optimizer.load_state_dict(state["optimizer"])  # collective
        elif isinstance(self.optimizer, ClientOptimizer):
            self.optimizer.import_deepspeed(state["optimizer"])
        else:
            self._import(state)

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
        steps = self.gradient_accumulation_steps()
        done = state.get("micro_steps", self.global_steps * steps)
        self.micro_steps = done - done % steps  # the gradients of an open update are not saved
        self.loaded_checkpoint_dp_world_size = state["dp_world_size"]
        self.loaded_checkpoint_mp_world_size = state.get("mp_world_size", 1)
        saved = state["lr_scheduler"]
        if schedule and self.lr_scheduler is not None and saved is not None:
            self.lr_scheduler.load_state_dict(saved)

    # ---- weights alone ---------------------------------------------------------------------------

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state_dict(); without the parameters that require no gradient, if asked."""
        state: dict[str, Any] = self.module.state_dict(
            destination=destination, prefix=prefix, keep_vars=keep_vars
        )
        if exclude_frozen_parameters:
            frozen = [n for n, p in self.module.named_parameters() if not p.requires_grad]
            for name in frozen:
                state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: LoadFn | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Loads checkpoint["module"]; custom_load_fn as in load_checkpoint()."""
        if custom_load_fn is not None:
            custom_load_fn(src=checkpoint["module"], dst=self.module)
        else:
            self.module.load_state_dict(checkpoint["module"], strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Rank 0 writes the module's state_dict() alone; with an mpu the first shard's, as in
        DeepSpeed. Every rank has to call it."""
        path = Path(save_dir) / save_filename

        def save() -> None:
            if self.comm.rank == 0 and self._shard == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                less = exclude_frozen_parameters
                files.write(path, self.module_state_dict(exclude_frozen_parameters=less))

        files.together(self.comm, "writing the model", save)
        return True

    save_fp16_model = save_16bit_model
