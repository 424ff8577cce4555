"""Checks of what Lightning's Trainer does around a module.

In: a context. Out: findings. The reference is the Trainer by itself in one process, on the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rannc_backend
from rannc_backend.integrations.lightning import RanncStrategy
from tests.distributed.harness.context import Context
from tests.distributed.lightning_checks import default_dtype
from tests.distributed.loop_checks import WIDTH, compare_losses

ROWS = 12
_QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "enable_progress_bar": False,
}


class Classifier(L.LightningModule):
    """A network that Lightning asks for when it knows the ranks, and the losses of its steps over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """The network, once."""
        if not hasattr(self, "net"):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
            self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """The loss of this rank's rows."""
        loss = F.cross_entropy(self.net(batch[0]) * self.scale, batch[1])
        self.note(loss)
        return loss

    def note(self, loss: Tensor) -> None:
        """Keep the mean over ranks."""
        self.losses.append(float(self.all_gather(loss.detach()).mean()))

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """The same, as "valid"."""
        self.log("valid", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        """The same, as "test"."""
        self.log("test", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        """[rows, 3]."""
        found: Tensor = self.net(batch[0])
        return found

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Adversaries(Classifier):
    """Two networks with an optimizer each, stepped by the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def configure_model(self) -> None:
        """They are there."""

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:  # type: ignore[override]
        """One step of each, the second clipped."""
        makes, judges = self.optimizers()  # type: ignore[misc]
        x = batch[0]
        wanted, others = (torch.full((len(x), 1), value) for value in (1.0, 0.0))
        self.toggle_optimizer(makes)
        loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(x)), wanted)
        self._step(makes, loss)
        self.toggle_optimizer(judges)
        loss = F.binary_cross_entropy_with_logits(self.discriminator(torch.sin(3 * x)), wanted)
        made = self.discriminator(self.generator(x).detach())
        self._step(judges, (loss + F.binary_cross_entropy_with_logits(made, others)) / 2, clip=0.05)

    def _step(self, optimizer: Any, loss: Tensor, clip: float | None = None) -> None:
        self.manual_backward(loss)
        if clip is not None:
            self.clip_gradients(optimizer, gradient_clip_val=clip, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        self.note(loss)

    def configure_optimizers(self) -> Any:
        """One for each."""
        return [
            torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.generator, self.discriminator)
        ], []


def trainer_parts(context: Context) -> None:
    """Manual steps of two optimizers, clipping by value with accumulation, the best checkpoint, predictions, averages."""
    folder = context.directory / context.case.name
    with default_dtype(context):
        for part in (_two, _clipped, _best, _averaged, _averaged_late):
            found = part(context, folder / "ranks", False)
            wanted = part(context, folder / f"alone-{context.rank}", True)
            compare_losses(context, part.__name__, found, wanted)
        error = context.findings.raises(
            "an early average",
            ("UserInputError",),
            lambda: _fit(context, Classifier(), False, whole=True, callbacks=[WeightAveraging()]),
        )
        context.findings.that("WeightAveraging has copied" in str(error), f"another error: {error}")


def _loader(context: Context, plain: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(4 * ROWS, WIDTH, generator=generator),
        torch.randint(0, 3, (4 * ROWS,), generator=generator),
    )
    size, rank = (1, 0) if plain else (context.case.world, context.rank)
    return DataLoader(data, ROWS // size, sampler=DistributedSampler(data, size, rank, shuffle=False))


def _fit(
    context: Context,
    module: Classifier,
    plain: bool,
    *,
    validates: bool = False,
    whole: bool = False,
    start: Any = None,
    **settings: Any,
) -> L.Trainer:
    torch._dynamo.reset()
    place: dict[str, Any] = {"strategy": "auto", "accelerator": "cpu", "devices": 1}
    if not plain:
        place = {"strategy": RanncStrategy(context.case.compile_options(), modules=[""] if whole else None)}
    trainer = L.Trainer(precision="64-true", **place, **(_QUIET | {"max_epochs": 1} | settings))
    loaders = _loader(context, plain), _loader(context, plain) if validates else None
    trainer.fit(module, *loaders, ckpt_path=start, weights_only=False)
    return trainer


def _two(context: Context, folder: Any, plain: bool) -> Sequence[float]:
    module = Adversaries()
    _fit(context, module, plain)
    return module.losses


def _clipped(context: Context, folder: Any, plain: bool) -> Sequence[float]:
    module = Classifier()
    _fit(
        context,
        module,
        plain,
        accumulate_grad_batches=2,
        max_epochs=2,
        gradient_clip_val=0.02,
        gradient_clip_algorithm="value",
    )
    return module.losses


def _best(context: Context, folder: Any, plain: bool) -> Sequence[float]:
    module = Classifier()
    best = ModelCheckpoint(folder, monitor="valid")
    trainer = _fit(
        context,
        module,
        plain,
        validates=True,
        max_epochs=6,
        enable_checkpointing=True,
        callbacks=[best, EarlyStopping("valid", patience=1, min_delta=0.03)],
    )
    (tested,) = trainer.test(
        module, _loader(context, plain), ckpt_path="best", verbose=False, weights_only=False
    )
    made: Any = trainer.predict(module, _loader(context, plain))
    score = module.all_gather(torch.cat(made).sum()).sum()
    assert best.best_model_score is not None
    return [*module.losses, float(best.best_model_score), trainer.current_epoch, tested["test"], float(score)]


def _averaged(context: Context, folder: Any, plain: bool) -> Sequence[float]:
    """A moving average, which is validated, and which another run goes on with."""
    saves = ModelCheckpoint(folder, filename="average", enable_version_counter=False)
    found: list[float] = []
    for epochs, callbacks, start in ((1, [saves], None), (2, [], folder / "average.ckpt")):
        module = Classifier()
        trainer = _fit(
            context,
            module,
            plain,
            validates=True,
            max_epochs=epochs,
            enable_checkpointing=bool(callbacks),
            callbacks=[EMAWeightAveraging(decay=0.9), *callbacks],
            start=start,
        )
        found += [*module.losses, float(trainer.callback_metrics["valid"])]
        if not plain:
            rannc_backend.barrier()
    (tested,) = trainer.test(module, _loader(context, plain), verbose=False)
    return [*found, tested["test"]]


def _averaged_late(context: Context, folder: Any, plain: bool) -> Sequence[float]:
    module = Classifier()
    module.configure_model()  # the callback copies the module before
    late = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=2)
    trainer = _fit(context, module, plain, max_epochs=3, callbacks=[late])
    (tested,) = trainer.test(module, _loader(context, plain), verbose=False)
    return [*module.losses, tested["test"]]
