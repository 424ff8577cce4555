"""Train an enlarged ResNet on scikit-learn's images of digits, with the loss outside of the model and
validation after each epoch.

    mpirun -np 2 python examples/train_resnet.py --width-factor 2
    mpirun -np 4 python examples/train_resnet.py --arch resnet50x2 --batch 256 --save run --resume

The model is Hugging Face's, unmodified. `--arch` is the small one for digits, or resnet50, resnet101,
resnet152; a factor behind it, as in RaNNC's resnet152x8, multiplies every number of channels, as
--width-factor does. The last batch of an epoch is smaller, and the ranks' shares of it differ. In validation
the model is in eval mode: BatchNorm then uses its running statistics.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed
import torch.nn.functional as F
from reporting import Progress, rank_and_world
from sklearn.datasets import load_digits
from sources import has_checkpoint
from transformers import ResNetConfig, ResNetForImageClassification

import rannc_backend

NUM_VALIDATION_IMAGES = 297
# Kind of block, channels of the embedding and of each resolution, blocks per resolution.
ARCHITECTURES = {
    "digits": ("basic", 16, (16, 32, 64), (1, 1, 1)),
    "resnet50": ("bottleneck", 64, (256, 512, 1024, 2048), (3, 4, 6, 3)),
    "resnet101": ("bottleneck", 64, (256, 512, 1024, 2048), (3, 4, 23, 3)),
    "resnet152": ("bottleneck", 64, (256, 512, 1024, 2048), (3, 8, 36, 3)),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "-a", "--arch", default="digits", help=f"{', '.join(ARCHITECTURES)}; with a width factor: resnet50x2"
    )
    parser.add_argument("--width-factor", type=float, default=1.0, help="multiplies every number of channels")
    parser.add_argument("--batch", type=int, default=128, help="images per step over all ranks")
    parser.add_argument("--epochs", type=int, default=3, help="in all, those before --resume included")
    parser.add_argument("--images", type=int, default=1500, help="images to train on")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", default="", help="directory for checkpoints after each epoch; empty: none")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --save, if there is one"
    )
    parser.add_argument("--micro-batches", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--stages", type=int, default=0, help="0: the planner decides")
    parser.add_argument("--stage-compiler", default="inductor" if torch.cuda.is_available() else "eager")
    parser.add_argument("--every", type=int, default=10, help="steps between two lines")
    return parser.parse_args(argv)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images [1797, 1, 8, 8] with values from 0 to 1, and their labels, in a fixed random order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[order], torch.tensor(data.target, dtype=torch.int64)[order]


def share(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a global batch; shares differ by one row where it does not divide."""
    rank, world = rank_and_world()
    return tensor.tensor_split(world)[rank]


def total(number: float) -> float:
    """The sum of a number over all ranks; the backend has started torch.distributed by now."""
    tensor = torch.tensor(number, dtype=torch.float64)
    if torch.distributed.is_initialized():
        tensor = tensor.cuda() if torch.distributed.get_backend() == "nccl" else tensor
        torch.distributed.all_reduce(tensor)
    return tensor.item()


def build(arch: str, width_factor: float) -> ResNetForImageClassification:
    """The model, in training mode; `arch` as in the flags."""
    name, _, multiple = arch.partition("x")
    if name not in ARCHITECTURES or not (multiple or "1").isdigit():
        raise SystemExit(
            f"--arch {arch}: there are {', '.join(ARCHITECTURES)}, with x2, x4, ... behind for a width factor"
        )
    factor = width_factor * int(multiple or 1)
    kind, embedding, channels, depths = ARCHITECTURES[name]
    config = ResNetConfig(
        num_channels=1,
        embedding_size=round(embedding * factor),
        hidden_sizes=[round(number * factor) for number in channels],
        depths=list(depths),
        layer_type=kind,
        num_labels=10,
    )
    torch.manual_seed(0)
    return ResNetForImageClassification(config).train()


def main(argv: Sequence[str] | None = None) -> float:
    """Train; give the accuracy on the validation images."""
    flags = parse(argv)
    images, labels = digits()
    train = slice(0, min(flags.images, len(images) - NUM_VALIDATION_IMAGES))
    validation = slice(len(images) - NUM_VALIDATION_IMAGES, None)
    model = build(flags.arch, flags.width_factor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    options = {
        "pipeline_num": flags.micro_batches,
        "partition_num": flags.stages,
        "stage_compiler": flags.stage_compiler,
    }
    compiled = torch.compile(model, backend="rannc", options=options)
    first = rannc_backend.load_checkpoint(flags.save, model, optimizer).step if has_checkpoint(flags) else 0
    progress = Progress(what="images", every=flags.every)
    accuracy = 0.0
    for epoch in range(first, flags.epochs):
        model.train()
        for batch, answers in zip(images[train].split(flags.batch), labels[train].split(flags.batch)):
            optimizer.zero_grad()
            loss = F.cross_entropy(compiled(pixel_values=share(batch)).logits, share(answers))
            loss.backward()
            optimizer.step()
            progress.step(loss.item(), len(batch))
        model.eval()
        with torch.no_grad():
            guesses = compiled(pixel_values=share(images[validation])).logits.argmax(-1)
        accuracy = total((guesses == share(labels[validation])).sum().item()) / NUM_VALIDATION_IMAGES
        if flags.save:
            rannc_backend.save_checkpoint(flags.save, model, optimizer, step=epoch + 1, keep=2)
    progress.end(accuracy=f"{accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
