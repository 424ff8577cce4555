"""The part of the data that each rank reads: of a list of files, and of the samples of a dataset.

In: files, or the number of samples. Out: for each rank its part, such that all parts together are everything exactly
once. Ranks that read are all ranks of the job; with the option gather_inputs=False rank 0 alone does, which needs none
of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import TypeVar

import torch

from rannc_backend.errors import UserInputError
from rannc_backend.runtime.job import bootstrap

File = TypeVar("File")


def slice_files(
    files: Sequence[File],
    *,
    uneven: bool = False,
    drop_last: bool = False,
    rank: int | None = None,
    num_ranks: int | None = None,
) -> list[File]:
    """The files that this rank reads: file i is rank ``i % num_ranks``'s.

    Args:
        files: the same on all ranks, in the same order.
        uneven: allows that some ranks have one file more than others.
        drop_last: leaves out the last files, which do not go round.
        rank: whose part; None: this rank's.
        num_ranks: how many read; None: all ranks of the job. Without ``rank`` or ``num_ranks`` the call is collective
            where it is the first in a process, which joins the job.

    Returns:
        Files of the list, in its order.

    Raises:
        UserInputError: the number of files is no multiple of ``num_ranks``, and neither ``uneven`` nor ``drop_last``
            says what to do; both do; there are fewer files than ranks; or there is no such rank.
    """
    rank, num_ranks = _place(rank, num_ranks)
    if uneven and drop_last:
        raise UserInputError(
            "files are to be divided unevenly, and the last ones to be dropped",
            cure="give one of uneven and drop_last.",
        )
    number, rest = len(files), len(files) % num_ranks
    if number < num_ranks:
        raise UserInputError(
            f"{number} files for {num_ranks} ranks: some would read nothing, and every rank passes rows to each call",
            cure="write more and smaller files, or let all ranks read all files and divide samples with RankBatches.",
        )
    if rest and not (uneven or drop_last):
        raise UserInputError(
            f"{number} files cannot be divided among {num_ranks} ranks: {rest} would be left over",
            cure="give uneven=True (some ranks read one file more) or drop_last=True (the last ones are not read).",
        )
    return list(files[rank : number - rest if drop_last else number : num_ranks])


class RankBatches(torch.utils.data.Sampler[list[int]]):
    """Batches of sample numbers for this rank: ``DataLoader(dataset, batch_sampler=RankBatches(dataset, 8))``.

    Every epoch has every sample once over all ranks, and no sample twice; all ranks have the same number of batches.
    Samples that do not fill the last step are divided among the ranks, with sizes that differ by one at most. The
    numbers of a step over all ranks, in rank order, are those of one process whose batches are ``num_ranks`` times as
    large, without ``shuffle`` in the order of the dataset.

    Args:
        data: the dataset, or anything that has a length.
        batch_size: samples of a full batch of one rank.
        shuffle: whether each epoch has an order of its own, the same on all ranks. Call `set_epoch` before each.
        seed: of these orders.
        drop_last: leaves out the last samples, which do not fill a step.
        rank, num_ranks: as of `slice_files`.

    Raises:
        UserInputError: ``batch_size`` is below 1, there are fewer samples than ranks, there is no such rank, or with
            ``batch_size=1`` the number of samples is no multiple of the ranks.
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        self.data, self.batch_size = data, batch_size
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.rank, self.num_ranks = _place(rank, num_ranks)
        if batch_size < 1:
            raise UserInputError(
                f"batch_size is {batch_size}", cure="give the samples of a rank's batch, 1 or more."
            )
        full = batch_size * self.num_ranks
        number = len(data)
        self._steps = [full] * (number // full)
        rest = 0 if drop_last else number % full
        if rest:
            self._steps.append(rest)
            # Every rank passes at least one sample to each call: the last step takes some from the one before it.
            missing = max(self.num_ranks - rest, 0)
            if missing and (len(self._steps) == 1 or batch_size == 1):
                raise UserInputError(
                    f"{number} samples in batches of {batch_size} on {self.num_ranks} ranks leave {rest} for the last "
                    "step, which is less than one for each rank",
                    cure="give drop_last=True, or another batch_size.",
                )
            if missing:
                self._steps[-2:] = [full - missing, rest + missing]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(len(self.data)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        begin = 0
        for size in self._steps:
            each, more = divmod(size, self.num_ranks)
            first = begin + self.rank * each + min(self.rank, more)
            yield order[first : first + each + (self.rank < more)]
            begin += size


def _place(rank: int | None, num_ranks: int | None) -> tuple[int, int]:
    if num_ranks is None or rank is None:
        world = bootstrap.start()
        rank, num_ranks = world.rank if rank is None else rank, num_ranks or world.size
    if not 0 <= rank < num_ranks:
        raise UserInputError(
            f"there is no rank {rank} of {num_ranks}", cure="give a rank from 0, below num_ranks."
        )
    return rank, num_ranks
