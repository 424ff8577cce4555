"""Training scripts as users write them, for `rannc verify`: `verify_worker.py CASE`. Used by test_verify.py.

In: the case. Out: what it trains. A fault changes the backend, and so the ranks alone: what one process
computes stays right.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0"))))
OPTIONS = {"stage_compiler": "eager", "cluster": "generic-cpu", "report_steps": 0}


class Net(nn.Module):
    """Layers in a list, some noise if asked for."""

    def __init__(
        self, noise: Callable[[Tensor], Tensor] | None = None, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.dropout = nn.Dropout(0.3)
        self.norm = norm or nn.Identity()
        self.noise = noise
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return self.head(self.norm(x if self.noise is None or not self.training else self.noise(x)))


def train_outside(net: nn.Module, num_steps: int = 3) -> None:
    """The loss outside of the model, of unequal numbers of rows, in two parts per step, clipped, with a
    schedule.
    """
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model = torch.compile(net, backend="rannc", options=OPTIONS)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for rows in (4 + RANK, 3):
            x, labels = torch.randn(rows, 8), torch.randint(3, (rows,))
            (nn.functional.cross_entropy(model(x), labels) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        model(torch.randn(5, 8))


def train_gpt2(num_layers: int = 4) -> None:
    """Hugging Face's GPT-2 as it comes: dropout 0.1, tied embeddings, the loss inside in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(n_layer=num_layers, n_embd=16, n_head=2, vocab_size=31, n_positions=8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = torch.compile(net, backend="rannc", options=OPTIONS)
    for _ in range(2):
        ids = torch.randint(31, (3, 8))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def noise(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, 0.5)


def scale_a_gradient(name: str) -> None:
    """On rank 1 the last gradient of every backward is a thousandth too large."""
    from rannc_backend.runtime.step.graph_runtime import GraphRuntime

    original = GraphRuntime.backward

    def backward(self: GraphRuntime, step: object, grads: object, *, keep: bool) -> object:
        observer, self.switches.observer = self.switches.observer, None
        result = original(self, step, grads, keep=keep)
        self.switches.observer = observer
        tensors = observer.models.parameters()
        if RANK == 1 and tensors[name].grad is not None:
            tensors[name].grad[1] *= 1.001
        observer.published(self)
        return result

    GraphRuntime.backward = backward


def main(case: str) -> None:
    match case:
        case "outside":
            train_outside(Net())
        case "gpt2":
            train_gpt2()
        case "wrong_gradient":
            scale_a_gradient("head.bias")
            train_outside(Net())
        case "noise":
            train_outside(Net(noise))
        case "statistics":
            train_outside(Net(norm=nn.BatchNorm1d(8)))
        case "single":
            model = torch.compile(Single(), backend="rannc", options=OPTIONS)
            model(torch.randn(2, 4)).sum().backward()
        case "fails":
            if RANK == 1:
                raise KeyError("learning_rate")
            train_outside(Net())
        case "plain":
            Net()(torch.randn(2, 8))
        case "hangs":
            time.sleep(1000)


class Single(nn.Module):
    """Float32 alone: a table that it makes itself has no other dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) @ torch.ones(4, 4, dtype=torch.float32)


if __name__ == "__main__":
    main(sys.argv[1])
