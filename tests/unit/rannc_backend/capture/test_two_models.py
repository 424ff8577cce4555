"""Models of one class, each compiled: every one computes with its own parameters (Dynamo alone takes them for
the same).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# More than Dynamo compiles of one function before it gives up.
NUM_MODELS = 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def test_each_model_has_its_own_parameters_and_gradients() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    models = [Net() for _ in range(NUM_MODELS)]
    compiled = [
        torch.compile(model, backend="rannc", options={"stage_compiler": "eager"}) for model in models
    ]
    x = torch.randn(5, 4)
    for _ in range(2):
        for model, call in zip(models, compiled):
            model.zero_grad()
            output = call(x)
            assert torch.equal(output, model(x))
            output.sum().backward()
            torch.testing.assert_close(model.layer.weight.grad, x.sum(0).expand(3, 4))


def test_a_function_of_one_model_and_then_of_another() -> None:
    torch._dynamo.reset()
    models = [Net(), Net()]
    chosen = [models[0]]

    @torch.compile(backend="rannc", options={"stage_compiler": "eager"})
    def function(x: Tensor) -> Tensor:
        return chosen[0](x).square()

    x = torch.randn(5, 4)
    for model in (*models, models[0]):
        chosen[0] = model
        torch.testing.assert_close(function(x), model(x).square())
