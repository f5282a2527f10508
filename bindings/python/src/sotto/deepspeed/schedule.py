"""The learning-rate schedule of a configuration, as initialize() returns it."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import InvalidStateError
from ..torch.base import SottoOptimizer


class ConfigSchedule:
    """Shows the schedule that runs inside the optimizer's step.

    It advances with every update that is not skipped; its state is part of the optimizer's.
    """

    def __init__(self, optimizer: SottoOptimizer, kind: str) -> None:
        self.optimizer = optimizer
        self.kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind}, run by {type(self.optimizer).__name__}>"

    @property
    def last_batch_iteration(self) -> int:
        """Updates that the schedule has seen, less one. Local."""
        return int(self.optimizer.schedule_iteration)

    def get_lr(self) -> list[float]:
        """The learning rate of the next step, for each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """As get_lr()."""
        return self.get_lr()

    def step(self, *_: Any) -> NoReturn:
        """Refused: a second driver would run the schedule twice as fast."""
        raise InvalidStateError(
            f"{self.kind} of the configuration advances with engine.step(); do not call its step()"
        )

    def state_dict(self) -> dict[str, Any]:
        """The position, which is in the optimizer's state too. Local."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what state_dict() gave, here or in DeepSpeed. Collective."""
        iteration = state.get("last_batch_iteration", self.last_batch_iteration)
        if iteration != self.last_batch_iteration:
            self.optimizer.continue_schedule(iteration)

    def go_on_behind(self, iteration: int) -> None:
        """From `iteration` on, behind the next update, which keeps its rate. Collective."""
        self.optimizer.continue_schedule(iteration)
