"""An operator that runs code as written, which uses one of its tensors for each result that it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from rannc_backend.passes.kept_functions import InnerWork, define_operator

LIBRARY = torch.library.Library("rannc_tests_choosing", "FRAGMENT")


class Doubling:
    """Twice the one, three times the other; each tensor has a gradient where its own result has one."""

    takes_outputs: ClassVar[bool] = False
    has_gradient: ClassVar[tuple[bool, ...]] = (True, True)
    runs_whole: ClassVar[str] = "doubling"
    work: ClassVar[InnerWork] = InnerWork()

    def forward(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        return [tensors[0] * 2, tensors[1] * 3]

    def backward(
        self, grads: Sequence[Tensor | None], tensors: Any, sizes: Any, outputs: Any
    ) -> list[Tensor | None]:
        return [None if grad is None else grad * factor for grad, factor in zip(grads, (2, 3), strict=True)]

    def fake_forward(self, tensors: Sequence[Tensor], sizes: Any) -> list[Tensor]:
        return [torch.empty_like(each) for each in tensors]

    def fake_backward(self, grads: Any, tensors: Sequence[Tensor], sizes: Any, outputs: Any) -> list[Tensor]:
        return [torch.empty_like(each) for each in tensors]


define_operator(LIBRARY, "doubling", Doubling())
doubling = torch.ops.rannc_tests_choosing.doubling.default
