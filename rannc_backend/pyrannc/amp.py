"""What RaNNC kept under ``pyrannc.amp``: its ties to Apex AMP, which no longer exists. Every name says what
to write instead.
"""

from __future__ import annotations

from typing import NoReturn

from rannc_backend.errors import UserInputError


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise UserInputError(
        f"pyrannc.amp.{name} belongs to Apex AMP, which no longer exists",
        cure='call the model under autocast: with torch.autocast("cuda", dtype=torch.bfloat16): loss = '
        "model(x); with float16 also "
        "torch.amp.GradScaler, which takes all ranks into account.",
    )
