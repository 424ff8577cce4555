"""Checks of models that once ended in raw errors, of refusals on all ranks, and of what the log says of
exceptions of the contract.

In: a context. Out: findings. One job does several models each: a model costs a second, a job costs many.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

from rannc_backend.errors import ModelError, RanncError
from tests.distributed.harness.context import Context
from tests.odd_models import LENGTH, MODELS, WIDTH, EncoderLayers, batch, worst_error

EXACT = 1e-12
# Where a model computes in float32 itself.
NARROW = 1e-6


def _step(
    context: Context, model: nn.Module, alone: nn.Module, values: dict[str, Tensor], **options: Any
) -> float:
    """The largest error of the loss and of the gradients of this rank after one step from equal weights."""
    torch._dynamo.reset()
    start, stop = context.interval
    compiled = torch.compile(model, **context.compile_arguments(**options))
    result = compiled(**{name: value[start:stop].clone() for name, value in values.items()})
    expected = alone(**values)
    result, expected = (value if isinstance(value, Tensor) else value.loss for value in (result, expected))
    result.backward()
    expected.backward()
    return max(abs(float(result) / float(expected) - 1.0), worst_error(model, alone))


def odd_models(context: Context) -> dict[str, Any]:
    """The models of `tests.odd_models` train as in one process."""
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().double()
        # Batch normalisation is that of one process with one micro-batch on one replica.
        options = {"pipeline_num": 1} if name == "transposed_norm" else {}
        if name == "transposed_norm" and context.case.num_stages == 1:
            continue
        error = _step(
            context, model, copy.deepcopy(model), {"x": batch(sum(context.case.local_rows))}, **options
        )
        context.findings.that(error <= EXACT, f"{name}: off by {error}")
    _marked_inputs(context)
    _evaluated(context)
    return {}


def _evaluated(context: Context) -> None:
    """Layers of torch are other operators in evaluation mode, under the owners of training."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = EncoderLayers().double()
    alone = copy.deepcopy(model).eval()
    start, stop = context.interval
    x = batch(sum(context.case.local_rows))
    compiled = torch.compile(model, **context.compile_arguments())
    compiled(x[start:stop].clone())
    model.eval()
    with torch.no_grad():
        error = abs(float(compiled(x[start:stop].clone())) / float(alone(x)) - 1.0)
    context.findings.that(error <= EXACT, f"layers of torch that are evaluated: off by {error}")


class _TakesComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, turn: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        y = x * turn + shift
        z = self.last(self.first(y.real) + 3 * y.imag)
        # Rows for the user, from one stage that is another one's neighbour and from the last.
        return torch.complex(z, y.real).conj(), torch._neg_view(y.imag + z)


def _marked_inputs(context: Context) -> None:
    """A batch, a value for all rows, and outputs that are only marked as conjugate or negative."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _TakesComplex().double()
    alone = copy.deepcopy(model)
    start, stop = context.interval
    rows = torch.complex(batch(sum(context.case.local_rows)), batch(sum(context.case.local_rows), 1))
    turn, shift = torch.complex(*batch(2)[:, 0]).conj(), torch.complex(*batch(2, 3)[:, 0]).conj().imag
    compiled = torch.compile(model, **context.compile_arguments())
    got, expected = compiled(rows[start:stop].conj(), turn, shift), alone(rows.conj(), turn, shift)
    for mine, theirs in zip(got, expected, strict=True):
        error = float((mine - theirs[start:stop]).abs().max())
        context.findings.that(error <= EXACT, f"an output of marked inputs is off by {error}")
    # Gradients that come in are marked, too; they are averaged over ranks.
    loss, loss_alone = (
        complex_rows.conj().imag.square().sum() + rows.sin().sum() for complex_rows, rows in (got, expected)
    )
    loss.backward()
    (loss_alone / context.case.world).backward()
    error = worst_error(model, alone)
    context.findings.that(error <= EXACT, f"gradients of marked inputs are off by {error}")


def library_models(context: Context) -> dict[str, Any]:
    """Models of a library with the same things in them."""
    import transformers

    tokens = torch.randint(
        3, 40, (sum(context.case.local_rows), 8), generator=torch.Generator().manual_seed(0)
    )
    series = batch(sum(context.case.local_rows)).new_zeros(sum(context.case.local_rows), 16, 2)
    series += torch.randn(series.shape, generator=torch.Generator().manual_seed(1), dtype=series.dtype)
    small = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    heads = {
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
    }
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Tensor], dict[str, Any], float]] = {
        "XLNetLMHeadModel": (
            "XLNetConfig", {"vocab_size": 40, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "dropout": 0.0},
            {"input_ids": tokens, "labels": tokens}, {}, NARROW,
        ),
        "PatchTSTForPrediction": (
            "PatchTSTConfig",
            {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4, "d_model": 16,
             "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "loss": "mse", "head_dropout": 0.0, "ff_dropout": 0.0},
            {"past_values": series, "future_values": series[:, :4]}, {"pipeline_num": 1}, EXACT,
        ),
        "Qwen3_5ForCausalLM": (
            "Qwen3_5TextConfig",
            {**small, **heads, "num_key_value_heads": 1, "layer_types": ["linear_attention", "full_attention"], "use_cache": False,
             "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1},
            {"input_ids": tokens, "labels": tokens}, {}, NARROW,
        ),
        "NystromformerForMaskedLM": (
            "NystromformerConfig",
            {**small, "segment_means_seq_len": 8, "num_landmarks": 8, "conv_kernel_size": 3, "hidden_dropout_prob": 0.0,
             "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 32},
            {"input_ids": tokens, "labels": tokens}, {}, EXACT,
        ),
    }  # fmt: skip
    for name, (config, settings, values, options, most) in cases.items():
        if not hasattr(transformers, name):  # an older version of the library
            continue
        torch.manual_seed(0)
        model = getattr(transformers, name)(getattr(transformers, config)(**settings)).double().train()
        error = _step(context, model, copy.deepcopy(model), values, **options)
        context.findings.that(error <= most, f"{name}: off by {error}")
    _refused_by_dynamo(context, tokens, small)
    return {}


def _refused_by_dynamo(context: Context, tokens: Tensor, small: dict[str, Any]) -> None:
    """With fewer landmarks than tokens this model's mask does not fit, which it hides from plain calls only:
    the line is named.
    """
    import transformers

    torch._dynamo.reset()
    settings = {
        **small,
        "segment_means_seq_len": 8,
        "num_landmarks": 4,
        "conv_kernel_size": 3,
        "max_position_embeddings": 32,
    }
    model = transformers.NystromformerForMaskedLM(transformers.NystromformerConfig(**settings))
    try:
        torch.compile(model, **context.compile_arguments())(input_ids=tokens, labels=tokens)
        context.findings.that(False, "a mask that does not fit is not refused")
    except RanncError as error:
        is_told = (
            isinstance(error, ModelError)
            and "modeling_nystromformer.py:" in error.location
            and error.__cause__ is not None
        )
        context.findings.that(is_told, f"{type(error).__name__} {error}")


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class _Net(nn.Module):
    def __init__(self, *more: nn.Module, inside: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), *more, nn.Linear(WIDTH, WIDTH))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x.flatten(1)[:, :WIDTH])
        return y.square().mean() if self.inside else y


def notices(context: Context) -> dict[str, Any]:
    """Each exception is told once and by rank 0, only where it applies; what the line recommends avoids
    it.
    """
    replicated = context.case.num_stages == 1
    norm, dropout = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
    cases: list[tuple[str, nn.Module, dict[str, Any], list[str]]] = [
        (
            "norm",
            _Net(norm),
            {"pipeline_num": 2},
            ["slice of the batch (2 micro-batches" + " on 2 replicas" * replicated],
        ),
        (
            "norm_at_once",
            _Net(norm),
            {"pipeline_num": 1},
            ["of each slice of the batch (2 replicas)"] * replicated,
        ),
        ("dropout", _Net(dropout), {}, ["not the numbers that plain torch draws"]),
        ("bfloat16", _Net().to(torch.bfloat16), {"pipeline_num": 2}, ["gradients of parameters in bfloat16"]),
        ("outside", _Net(inside=False), {}, ["the mean over ranks"]),
        ("outside_sum", _Net(inside=False), {"gradients_reduce_method": "sum"}, ["the sum over ranks"]),
        ("nothing", _Net(nn.LayerNorm(WIDTH)), {"pipeline_num": 2}, []),
    ]
    logger, handler = logging.getLogger("rannc_backend.notices"), _Lines()
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    start, stop = context.interval
    for name, model, options, expected in cases:
        torch._dynamo.reset()
        handler.lines.clear()
        model = copy.deepcopy(model)
        dtype = next(model.parameters()).dtype
        compiled = torch.compile(model, **context.compile_arguments(**options))
        for step in range(2):
            compiled(batch(sum(context.case.local_rows), step)[start:stop].to(dtype)).sum().backward()
        wanted = expected if context.rank == 0 else []
        right = len(handler.lines) == len(wanted) and all(
            words in line for words, line in zip(wanted, handler.lines, strict=True)
        )
        context.findings.that(right, f"{name}: rank {context.rank} said {handler.lines}, not {wanted}")
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    if not replicated:
        _advice_is_right(context)
    return {}


def _advice_is_right(context: Context) -> None:
    torch.manual_seed(0)
    model = _Net(nn.BatchNorm1d(WIDTH)).double()
    values = {"x": batch(sum(context.case.local_rows))}
    alone = copy.deepcopy(model)
    error = _step(context, model, alone, values, pipeline_num=1)
    context.findings.that(error <= EXACT, f"with one micro-batch batch normalisation is off by {error}")
    state = model.state_dict()
    for name, value in alone.state_dict().items():
        if context.rank == 0:
            context.findings.that(
                torch.allclose(state[name].double(), value.double(), atol=EXACT), f"{name} differs"
            )


class _FailsInside(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return _helper(self.kind, self.linear(x)).square().mean()


def _helper(kind: str, y: Tensor) -> Tensor:
    if kind == "mixes":
        return y.softmax(0)
    if kind == "branches":
        return y if y.sum() > 0 else -y
    if kind == "sizes":
        return y @ y.new_ones(LENGTH + 1, 2)
    return nn.SyncBatchNorm(WIDTH).to(y.dtype)(y.flatten(0, 1))


def refusals(context: Context) -> dict[str, Any]:
    """A refusal is the same RanncError on all ranks under plain torch.compile, with the innermost line of the
    model's code.
    """
    for kind in ("mixes", "branches", "sizes", "synchronises"):
        torch._dynamo.reset()
        compiled = torch.compile(
            _FailsInside(kind).double(), **context.compile_arguments(whole_batch="never")
        )
        try:
            compiled(batch(4))
            context.findings.that(False, f"{kind}: not refused")
        except RanncError as error:
            text = f"{type(error).__name__} {error}"
            context.findings.that(isinstance(error, ModelError), f"{kind}: {text}")
            is_there = f"{__file__}:" in error.location and "in _helper" in error.location
            context.findings.that(is_there, f"{kind}: at {error.location!r}: {text}")
    return {}
