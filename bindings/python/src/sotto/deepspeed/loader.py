"""Loaders of a rank's micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class RepeatingLoader:
    """Starts a loader again at its end, for ever."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


class DeepSpeedDataLoader(DataLoader[Any]):
    """torch's loader; next() of the loader itself works too, as with DeepSpeed's.

    data_sampler: the sampler, under DeepSpeed's name; None for a dataset without length.
    post_process_func: of a batch and the sampler's state (None here); its result takes the batch's
    place.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._running: Iterator[Any] | None = None
        self.post_process_func: Any = None
        super().__init__(*arguments, **options)

    @property
    def data_sampler(self) -> Any:
        """Programs call its set_epoch()."""
        return None if isinstance(self.dataset, IterableDataset) else self.sampler

    @property
    def num_local_io_workers(self) -> int:
        """Processes that read for this rank."""
        return self.num_workers

    def __iter__(self) -> Any:
        batches = super().__iter__()
        if self.post_process_func is None:
            return batches
        function = self.post_process_func
        return (function(batch, None) for batch in batches)

    def __next__(self) -> Any:
        if self._running is None:
            self._running = iter(self)
        try:
            return next(self._running)
        except StopIteration:
            self._running = None
            raise


def sampler_of(dataset: Any, size: int, rank: int, *, shuffle: bool) -> Any:
    """What shares a dataset out among ranks; one without length shares itself out."""
    if isinstance(dataset, IterableDataset):
        return None
    return DistributedSampler(dataset, num_replicas=size, rank=rank, shuffle=shuffle)
