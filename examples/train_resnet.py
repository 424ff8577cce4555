"""Train a small ResNet on scikit-learn's images of digits, with the loss outside of the model.

    mpirun -np 2 python examples/train_resnet.py --width 32

The model is Hugging Face's, unmodified. The last batch of an epoch is smaller, and the ranks' shares of it differ. After each epoch
the model is validated in eval mode: BatchNorm then uses its running statistics.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed
import torch.nn.functional as F
from reporting import Progress, rank_and_world
from sklearn.datasets import load_digits
from transformers import ResNetConfig, ResNetForImageClassification

NUM_VALIDATION_IMAGES = 297


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags; see --help."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", type=int, default=16, help="channels of the first layers; later ones have up to four times as many")
    parser.add_argument("--depth", type=int, default=1, help="blocks per resolution")
    parser.add_argument("--batch", type=int, default=128, help="images per step over all ranks")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images", type=int, default=1500, help="images to train on")
    parser.add_argument("--lr", type=float, default=3e-3)
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


def main(argv: Sequence[str] | None = None) -> float:
    """Train; give the accuracy on the validation images."""
    flags = parse(argv)
    images, labels = digits()
    train = slice(0, min(flags.images, len(images) - NUM_VALIDATION_IMAGES))
    validation = slice(len(images) - NUM_VALIDATION_IMAGES, None)
    config = ResNetConfig(
        num_channels=1,
        embedding_size=flags.width,
        hidden_sizes=[flags.width, 2 * flags.width, 4 * flags.width],
        depths=[flags.depth] * 3,
        layer_type="basic",
        num_labels=10,
    )
    torch.manual_seed(0)
    model = ResNetForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=flags.lr)
    options = {
        "pipeline_num": flags.micro_batches,
        "partition_num": flags.stages,
        "stage_compiler": flags.stage_compiler,
    }
    compiled = torch.compile(model, backend="rannc", options=options)
    progress = Progress(what="images", every=flags.every)
    accuracy = 0.0
    for _ in range(flags.epochs):
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
    progress.end(accuracy=f"{accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
