"""deepspeed.checkpointing: activations are computed again in backward(), as PyTorch's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as recompute

from ..errors import InvalidArgumentError, UnsupportedError

_HINT = "every rank keeps its own inputs of a checkpointed part; leave it out"
_configured = False


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Takes the mpu and the section "activation_checkpointing" of a configuration.

    num_checkpoints has no meaning where nothing is contiguous; synchronize and profile have none
    either. Errors: UnsupportedError (partition_activations, contiguous_checkpointing,
    checkpoint_in_cpu).
    """
    global _configured
    section: dict[str, Any] = {}
    if deepspeed_config is not None:
        if not isinstance(deepspeed_config, dict):
            text = Path(deepspeed_config).read_text(encoding="utf-8")
            deepspeed_config = json.loads(text)
        section = deepspeed_config.get("activation_checkpointing") or {}
    asked = {
        "partition_activations": (partition_activations, "partition_activations"),
        "contiguous_checkpointing": (contiguous_checkpointing, "contiguous_memory_optimization"),
        "checkpoint_in_cpu": (checkpoint_in_cpu, "cpu_checkpointing"),
    }
    for name, (given, key) in asked.items():
        if section.get(key) if given is None else given:
            raise UnsupportedError(f"checkpointing.configure: {name} is not here: {_HINT}")
    _tracker.mpu = mpu_
    _configured = True


def is_configured() -> bool:
    """Whether configure() was called."""
    return _configured


def reset() -> None:
    """Nothing is kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), whose activations backward() computes again, with equal random numbers."""
    return recompute(function, *args, use_reentrant=False)


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """apply(function, all_outputs, *args), as DeepSpeed's autograd function has it."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """As checkpoint(); all_outputs is extended by what it returns."""
        outputs = checkpoint(function, *args)
        all_outputs += [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        return outputs


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Errors: UnsupportedError (True)."""
    if partition_activation:
        raise UnsupportedError(f"partition_activations_in_checkpoint: {_HINT}")


def set_num_layers(nlayers: int) -> None:
    """Has no meaning where nothing is contiguous."""


class RNGStatesTracker:
    """Random states by name: that of a model-parallel region is used in its fork()."""

    def __init__(self) -> None:
        self.mpu: Any = None
        self._states: dict[str, Any] = {}

    def reset(self) -> None:
        """Forgets all."""
        self._states.clear()

    def get_states(self) -> dict[str, Any]:
        """All, by name."""
        return dict(self._states)

    def set_states(self, states: dict[str, Any]) -> None:
        """What get_states() gave."""
        self._states = dict(states)

    def add(self, name: str, seed: int) -> None:
        """A new one. Errors: InvalidArgumentError (the name is taken)."""
        if name in self._states:
            raise InvalidArgumentError(f"random state {name!r} is there already")
        before = _random_state()
        torch.manual_seed(seed)
        self._states[name] = _random_state()
        _set_random_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """The block uses this state. Errors: InvalidArgumentError (not added)."""
        if name not in self._states:
            raise InvalidArgumentError(f"random state {name!r} was not added")
        before = _random_state()
        _set_random_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _random_state()
            _set_random_state(before)


def _random_state() -> Any:
    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state() if used else None
    return torch.get_rng_state(), cuda


def _set_random_state(state: Any) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


_tracker = RNGStatesTracker()


def get_cuda_rng_tracker() -> RNGStatesTracker:
    """The one of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """The default state gets `seed`, that of model-parallel regions one of each shard's own."""
    rank = 0 if _tracker.mpu is None else _tracker.mpu.get_model_parallel_rank()
    _tracker.reset()
    torch.manual_seed(seed)
    _tracker.add("model-parallel-rng", seed + 2718 + rank)
