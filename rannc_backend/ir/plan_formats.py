"""What of a plan says in which formats it sends, and what that saves.

In: numbers and names, as `plan.py`. Out: a frozen part of a `Plan`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

BoundaryDtype = Literal["same", "bf16", "fp16", "fp8"]
GradientDtype = Literal["same", "bf16", "fp16"]


class Formats(BaseModel):
    """The options boundary_dtype and gradient_dtype that a plan was made for; of a step, the bytes that messages between
    stages and buckets of gradients have less than as they are, summed over senders, and the predicted seconds that the
    same plan would take longer. Of gradients that are kept as rows of their tables, how many there are, the bytes that ranks
    reduce of them in a step at most, summed over ranks, and those of dense ones.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    boundary_dtype: BoundaryDtype = "same"
    gradient_dtype: GradientDtype = "same"
    saved_message_bytes: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    saved_gradient_bytes: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    saved_seconds: Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)] = 0.0
    num_row_gradients: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    row_gradient_bytes: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    dense_gradient_bytes: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0

    @property
    def are_exact(self) -> bool:
        """Whether all travels as it is."""
        return self.boundary_dtype == "same" and self.gradient_dtype == "same"
