"""Rows in an order that an index gives: what is taken is the model on any slices, and what is not is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from rannc_backend.passes.batch.layouts import SegmentEnds
from rannc_backend.passes.batch.orders import ORDERS
from rannc_backend.passes.pipeline import PassError
from tests.expert_models import LENGTH, MODELS, NUM_EXPERTS, WIDTH, Grouped, batch, products
from tests.unit.passes.batch.batch_tracing import trace
from tests.unit.passes.batch.slice_runner import run_in_slices, split_traced, worst_error

NUM_ROWS = 5
SLICES = ([5], [2, 3], [1, 1, 1, 1, 1])
K = 2


@pytest.mark.parametrize("name", MODELS)
def test_every_way_of_writing_experts_is_exact_in_slices(name: str) -> None:
    torch.manual_seed(0)
    traced = trace(MODELS[name]().double(), {"x": batch(NUM_ROWS, 0)})
    split = split_traced(traced)
    assert split.whole_batch is None
    assert max(worst_error(traced, split, sizes) for sizes in SLICES) < 1e-12


def test_an_expert_without_tokens() -> None:
    model = Grouped().double()
    with torch.no_grad():
        model.router.weight.copy_(torch.zeros_like(model.router.weight))
    traced = trace(model, {"x": batch(NUM_ROWS, 0)})
    assert max(worst_error(traced, split_traced(traced), sizes) for sizes in SLICES) < 1e-12


def test_on_the_whole_batch_nothing_is_in_an_order() -> None:
    """Its values are cut and given back as those of all rows."""
    traced = trace(Grouped().double(), {"x": batch(NUM_ROWS, 0)})
    split = split_traced(traced, together=True)
    layouts = [part for layout in split.layouts.values() for part in getattr(layout, "elements", (layout,))]
    assert not any(isinstance(layout, (*ORDERS, SegmentEnds)) for layout in layouts)
    assert worst_error(traced, split, [NUM_ROWS]) < 1e-12


class Written(nn.Module):
    """A model of one function of (tokens, keys, weights, table)."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).view(-1, WIDTH)
        return self.function(tokens, tokens[:, :NUM_EXPERTS].topk(K, -1)[1], self.weights)


def _ends(keys: Tensor) -> Tensor:
    return torch.histc(keys.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1).cumsum(0).to(torch.int32)


def _descending(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    keys, order = chosen.reshape(-1).sort(descending=True)
    return products(tokens[order // K], weights, _ends(keys)).square().sum()


def _negative(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    keys, order = (chosen.reshape(-1) - 1).sort()
    return products(tokens[order // K], weights, _ends(keys)).square().sum()


def _other_counts(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = chosen.reshape(-1).argsort()
    other = tokens[:, 1 : NUM_EXPERTS + 1].topk(K, -1)[1]
    return products(tokens[order // K], weights, _ends(other)).square().sum()


def _wrong_bins(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    keys, order = chosen.reshape(-1).sort()
    ends = torch.histc(keys.float(), NUM_EXPERTS, 0, 2 * NUM_EXPERTS).cumsum(0).to(torch.int32)
    return products(tokens[order // K], weights, ends).square().sum()


def _changed_keys(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    keys, order = chosen.reshape(-1).sort()
    return products(tokens[order // K], weights, _ends((keys - 1).clamp(min=0))).square().sum()


def _shifted(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = chosen.reshape(-1).argsort()
    return (tokens[order // K].roll(1, 0) * tokens[order // K]).sum()


def _counted_along(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = chosen.reshape(-1).argsort()
    return tokens[order // K].cumsum(0).square().sum()


def _other_order(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order, other = chosen.reshape(-1).argsort(), chosen.flip(1).reshape(-1).argsort()
    return (tokens[order // K] * tokens[other // K]).sum()


def _unsorted_beside(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = chosen.reshape(-1).argsort()
    return (tokens[order // K] * tokens.repeat_interleave(K, 0)).sum()


def _wrong_inverse(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order, other = chosen.reshape(-1).argsort(), chosen.flip(1).reshape(-1).argsort()
    return (tokens[order // K][other.argsort()].view(-1, K, WIDTH)[:, 0] * tokens).sum()


def _index_for_inverse(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = chosen.reshape(-1).argsort()
    return (tokens[order // K][order].view(-1, K, WIDTH)[:, 0] * tokens).sum()


def _wrong_divisor(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = chosen.reshape(-1).argsort()
    return (tokens[order // (2 * LENGTH)]).sum()


def _number_as_value(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    order = chosen.reshape(-1).argsort()
    return (tokens[order // K] * (order // K)[:, None]).sum()


def _kept_places(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """An expert's first two tokens: capacity, which counts positions over the batch."""
    keys, order = chosen.reshape(-1).sort()
    place = torch.arange(keys.shape[0]) - torch.searchsorted(keys, keys)
    return (tokens[order // K] * (place < 2)[:, None]).sum()


def _overwritten(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Two values for one token: which one stays is not said."""
    order = chosen.reshape(-1).argsort()
    return torch.zeros_like(tokens).index_put((order // K,), tokens[order // K].square()).sum()


def _ends_as_values(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return (tokens[:, None, :NUM_EXPERTS] * _ends(chosen.reshape(-1))).sum()


def _split_index(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    keys, order = chosen.reshape(-1).sort()
    return tokens[order.split(order.shape[0] // 2)[0] // K].sum() + keys.split(keys.shape[0] // 2)[1].sum()


REFUSED = (
    _split_index, _descending, _negative, _other_counts, _wrong_bins, _changed_keys, _shifted, _counted_along, _other_order,
    _unsorted_beside, _wrong_inverse, _index_for_inverse, _wrong_divisor, _number_as_value, _kept_places,
    _overwritten, _ends_as_values,
)  # fmt: skip


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_whatever_else_touches_an_order_is_refused(function: Callable[..., Tensor]) -> None:
    traced = trace(Written(function).double(), {"x": batch(NUM_ROWS, 0)})
    with pytest.raises(PassError):
        split_traced(traced)


@torch.library.custom_op("test_orders::first_weights", mutates_args=())
def first_weights(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Gets the ends of segments, and does something else."""
    return tokens @ weights[0]


@first_weights.register_fake
def _(tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return tokens.new_empty(tokens.shape[0], weights.shape[2])


def test_an_operator_with_ends_of_segments_is_tried() -> None:
    def function(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        keys, order = chosen.reshape(-1).sort()
        return first_weights(tokens[order // K], weights, _ends(keys)).square().sum()

    with pytest.raises(PassError, match="does not multiply each segment by its weights"):
        split_traced(trace(Written(function).double(), {"x": batch(NUM_ROWS, 0)}))


class Dropped(Grouped):
    """Dropout on sorted tokens, with dimensions before and behind them, and noise like them."""

    def mixed(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.reshape(-1).argsort()
        routed = F.dropout(tokens[order // K], 0.4)
        turned = F.dropout(routed.t(), 0.2).t() + 0.1 * torch.rand_like(routed)
        spread = F.dropout(turned.view(-1, K, WIDTH // K).softmax(-1), 0.3).view(-1, WIDTH)
        return spread[order.argsort()].view(tokens.shape[0], K, WIDTH).sum(1)


def test_random_numbers_of_sorted_tokens_do_not_depend_on_slices() -> None:
    torch.manual_seed(0)
    traced = trace(Dropped().double(), {"x": batch(NUM_ROWS, 0)})
    split = split_traced(traced)
    weights = [None] * traced.num_user_outputs
    first, *others = (run_in_slices(traced, split, sizes, weights, seed=3)[0] for sizes in SLICES)
    again = run_in_slices(traced, split, [NUM_ROWS], weights, seed=4)[0]
    for found in others:
        for one, other in zip(first, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(first[1], again[1])


def test_dropout_that_is_off_stays() -> None:
    def function(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.reshape(-1).argsort()
        return F.dropout(tokens[order // K], 0.0).square().sum()

    traced = trace(Written(function).double(), {"x": batch(NUM_ROWS, 0)})
    assert max(worst_error(traced, split_traced(traced), sizes) for sizes in SLICES) < 1e-12


class Remembering(Written):
    """Keeps what is true of a slice alone in a buffer."""

    def __init__(self, what: str) -> None:
        super().__init__(_wrong_bins)
        self.what = what
        self.register_buffer("kept", torch.zeros(NUM_EXPERTS, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x).view(-1, WIDTH)
        keys, _ = tokens[:, :NUM_EXPERTS].topk(K, -1)[1].reshape(-1).sort()
        counts = torch.histc(keys.float(), NUM_EXPERTS, 0, NUM_EXPERTS - 1).to(torch.int32)
        self.kept.copy_(counts if self.what == "counts" else counts.cumsum(0, dtype=torch.int32))
        return tokens.square().mean()


@pytest.mark.parametrize("what", ["counts", "ends"])
def test_buffers_are_not_set_from_a_slice(what: str) -> None:
    with pytest.raises(PassError, match="is set from rows of the batch|ends of segments"):
        split_traced(trace(Remembering(what).double(), {"x": batch(NUM_ROWS, 0)}))


# --- random programs: accepted means exact

#: Of a program's values, by what they are meant to be; each step makes one of another kind or of the same.
STEPS = (
    "take", "take_div", "scale", "table", "roll", "cumsum", "add_pair", "inverse", "wrong_inverse", "restore", "put",
    "add_back", "sort_again", "flip", "reshape", "softmax", "product", "mix",
)  # fmt: skip


def _program(steps: list[tuple[str, int]], *, ends: bool) -> Callable[..., Tensor]:
    """Most steps go on from the latest value; `ends`: the order is ended by its inverse."""

    def run(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        keys, order = chosen.reshape(-1).sort()
        wide, indices = [tokens.repeat_interleave(K, 0), tokens[order // K]], [order]
        for name, number in steps:
            value = wide[-1 if number % 4 else (number // 4) % len(wide)]
            index = indices[0 if number % 5 else (number // 5) % len(indices)]
            other = wide[-1 if number % 3 else (number // 3) % len(wide)]
            if name == "take":
                wide.append(value[index])
            elif name == "take_div":
                wide.append(tokens[index // K])
            elif name == "scale":
                wide.append(value.sin() * 1.5)
            elif name == "table":
                wide.append(value * weights[keys][:, 0])
            elif name == "roll":
                wide.append(value.roll(1, 0))
            elif name == "cumsum":
                wide.append(value.cumsum(number % 2))
            elif name in ("add_pair", "mix"):
                wide.append(value + other)
            elif name == "inverse":
                indices.append(index.argsort())
            elif name == "wrong_inverse":
                indices.append(index.flip(0))
            elif name == "restore":
                inverse = torch.empty_like(index)
                inverse[index] = torch.arange(index.shape[0])
                indices.append(inverse)
            elif name == "put":
                wide.append(torch.zeros_like(value).index_put((index,), other))
            elif name == "add_back":
                wide.append(torch.zeros_like(tokens).index_add(0, index // K, value).repeat_interleave(K, 0))
            elif name == "sort_again":
                indices.append((chosen * 3 % NUM_EXPERTS).reshape(-1).argsort())
            elif name == "flip":
                wide.append(value.flip(number % 2))
            elif name == "reshape":
                wide.append(value.view(-1, K, WIDTH).cumsum(1).view(-1, WIDTH))
            elif name == "softmax":
                wide.append(value.softmax(1 - number % 2))
            elif name == "product":
                wide.append(products(value, weights, _ends(keys)))
        place = torch.arange(1, WIDTH + 1).double()
        last = wide[-1][order.argsort()] if ends else wide[-1]
        return (last * last.sin() * tokens.repeat_interleave(K, 0)).sum() + (wide[-1] * place).square().sum()

    return run


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 59)), max_size=5), st.booleans())
def test_random_programs_are_refused_or_exact(steps: list[tuple[str, int]], ends: bool) -> None:
    torch.manual_seed(0)
    traced = trace(Written(_program(steps, ends=ends)).double(), {"x": batch(NUM_ROWS, 0)})
    try:
        split = split_traced(traced)
    except PassError:
        return
    assert max(worst_error(traced, split, sizes) for sizes in SLICES) < 1e-9, steps
