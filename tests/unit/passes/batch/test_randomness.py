"""Random numbers depend on seed, row and element alone, whatever the slices and the dtype; and they look
random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rannc_backend.passes.batch.batch_axis import is_random
from rannc_backend.passes.batch.layouts import Constant, Rows
from rannc_backend.passes.batch.randomness import (
    RANDOM_OPERATORS,
    attention,
    element_keys,
    mix,
    operator_key,
    random_bits,
    row_keys,
)
from rannc_backend.passes.pipeline import PassError
from tests.choice import mostly
from tests.unit.passes.batch.batch_tracing import Traced, trace
from tests.unit.passes.batch.slice_runner import relative_error, run_in_slices, split_traced

ROWS = 14
CPU = torch.device("cpu")


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def traced(function: Callable[[Tensor], Any], dtype: torch.dtype = torch.float64) -> Traced:
    torch.manual_seed(0)
    return trace(Applied(function), dict(x=torch.rand(ROWS, 4, 6, dtype=torch.float64).to(dtype) + 1))


def outputs(graph: Traced, sizes: Sequence[int], seed: int = 0) -> list[Tensor]:
    return run_in_slices(graph, split_traced(graph), sizes, [None] * graph.num_user_outputs, seed=seed)[0]


def _attention(x: Tensor) -> Tensor:
    q = x[:, None].expand(-1, 2, -1, -1)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4)


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_time_major": lambda x: F.dropout(x.transpose(0, 1), 0.3),
    "dropout_flat": lambda x: F.dropout(x.reshape(-1, 6), 0.3),
    "dropout_flat_time_major": lambda x: F.dropout(x.transpose(0, 1).reshape(-1, 6), 0.3),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "bernoulli": lambda x: torch.bernoulli(x - 1),
    "rand": lambda x: x * torch.rand(x.shape[0], 1, 1),
    "rand_like": lambda x: torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape[0], 6)[:, None],
    "randn_like": lambda x: torch.randn_like(x),
    "randint": lambda x: x * torch.randint(3, 9, (x.shape[0], 4, 1)),
    "uniform": lambda x: x.clone().uniform_(2, 5),
    "normal": lambda x: x.clone().normal_(2, 5),
    "exponential": lambda x: x.clone().exponential_(2.0),
    "gumbel": lambda x: F.gumbel_softmax(x, hard=True),
    "attention": _attention,
    "drop_path": lambda x: x * x.new_empty(x.shape[0], 1, 1).bernoulli_(0.6),
    "mask_of_parameters": lambda x: x * F.dropout(torch.ones(6, dtype=x.dtype), 0.5),
    "permutation": lambda x: x[:, torch.randperm(4)],
}


# Others of the same kind: dropouts of one more shape, numbers made of the same uniform ones.
IN_FULL = {
    "alpha_dropout", "dropout_flat", "dropout_time_major", "exponential", "feature_alpha_dropout", "rand_like", "randn_like",
    "uniform",
}  # fmt: skip


@pytest.mark.parametrize("name", mostly(DRAWS, [name for name in DRAWS if name not in IN_FULL]))
def test_draws_do_not_depend_on_slices(name: str) -> None:
    graph = traced(DRAWS[name])
    split = split_traced(graph)
    assert not any(is_random(node) for node in split.rowwise.graph.nodes if node.op == "call_function")
    (whole,) = outputs(graph, (ROWS,))
    for sizes in ((4, 4, 4, 2), (1, 13)):
        assert relative_error(outputs(graph, sizes)[0], whole) <= 1e-15
    assert relative_error(outputs(graph, (ROWS,), seed=1)[0], whole) > 1e-2, "another seed, other numbers"


def test_rows_and_operators_draw_different_numbers() -> None:
    first, second = outputs(traced(lambda x: (torch.rand_like(x), torch.rand_like(x))), (ROWS,))
    assert not torch.equal(first, second)
    assert first.reshape(-1).unique().numel() > 0.99 * first.numel()


def test_dtypes_get_the_same_mask() -> None:
    (wide,) = outputs(traced(lambda x: F.dropout(x, 0.3)), (ROWS,))
    (narrow,) = outputs(traced(lambda x: F.dropout(x, 0.3), torch.float32), (ROWS,))
    assert torch.equal(wide != 0, narrow != 0)
    assert narrow.dtype == torch.float32


def test_dropout_scales_and_has_the_gradient_of_its_mask() -> None:
    graph = traced(lambda x: F.dropout(x, 0.25))
    (dropped,) = outputs(graph, (ROWS,))
    x = graph.values[graph.batch[0]]
    kept = dropped != 0
    torch.testing.assert_close(dropped, torch.where(kept, x / 0.75, 0.0), rtol=1e-15, atol=0)
    assert 0.6 < kept.double().mean() < 0.9


def test_draws_without_rows_are_the_same_for_all_slices() -> None:
    graph = traced(lambda x: x * 0 + torch.rand(4, 6))
    (value,) = outputs(graph, (4, 10))
    assert torch.equal(value, value[:1].expand_as(value))


@pytest.mark.parametrize(
    "function", [lambda x: F.dropout(x, 0.0), lambda x: F.dropout(x, 0.5, training=False)]
)
def test_what_is_not_random_stays(function: Callable[[Tensor], Any]) -> None:
    split = split_traced(traced(function))
    assert not any(node.name == "rng_seed" for node in split.rowwise.graph.nodes)


def test_unknown_random_operators_are_refused() -> None:
    with pytest.raises(PassError, match=r"unknown random operator aten\.(geometric|log_normal)"):
        split_traced(traced(lambda x: x.clone().log_normal_()))


# --- quality of the numbers
# -----------------------------------------------------------------------------------------------


def bits(
    rows: int = 64,
    elements: int = 4096,
    *,
    seed: int = 0,
    first_row: int = 0,
    operator: int = 0,
    draw: int = 0,
) -> Tensor:
    """[rows, elements]"""
    keys = row_keys(torch.tensor(seed), torch.tensor(first_row), rows, CPU)
    shape = [rows, elements]
    return random_bits(keys, element_keys(elements, CPU), Rows(0), shape, operator_key(operator, draw))


def correlation(first: Tensor, second: Tensor) -> float:
    return torch.corrcoef(torch.stack([first.double().reshape(-1), second.double().reshape(-1)]))[0, 1].item()


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7, -1, 2**63 - 1])
def test_numbers_are_uniform(seed: int) -> None:
    values = bits(seed=seed)
    count = values.numel()
    assert values.min() >= 0 and values.max() < 2**32
    unit = values.double() / 2**32
    assert abs(unit.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    assert abs(unit.var() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    for shift in (24, 16, 8, 0):  # each byte by itself
        observed = torch.bincount((values >> shift & 255).reshape(-1), minlength=256).double()
        chi_square = ((observed - count / 256) ** 2 / (count / 256)).sum()
        assert 255 - 5 * 22.6 < chi_square < 255 + 5 * 22.6, shift


def test_rows_elements_operators_draws_and_seeds_are_not_correlated() -> None:
    base = bits()
    bound = 5 / base.numel() ** 0.5
    assert abs(correlation(base[1:], base[:-1])) < bound
    assert abs(correlation(base[:, 1:], base[:, :-1])) < bound
    for other in (bits(operator=1), bits(draw=1), bits(seed=1), bits(seed=2**32), bits(first_row=64)):
        assert abs(correlation(base, other)) < bound
        for bit in (31, 30, 16, 0):
            assert abs(correlation(base >> bit & 1, other >> bit & 1)) < bound


def test_no_row_repeats_another_under_any_operator() -> None:
    keys = torch.stack(
        [mix(row_keys(torch.tensor(3), torch.tensor(0), 512, CPU) ^ operator_key(op)) for op in range(48)]
    )
    # 24,576 keys of 32 bits: about 0.07 collisions are expected
    assert keys.unique().numel() >= keys.numel() - 2


def test_pairs_of_masks_are_independent() -> None:
    first, second = bits() < 0.1 * 2**32, bits(operator=1) < 0.1 * 2**32
    both = (first & second).double().mean().item()
    assert abs(both - 0.01) < 5 * (0.01 * 0.99 / first.numel()) ** 0.5


def test_mixing_is_a_bijection_with_avalanche() -> None:
    numbers = torch.arange(1 << 16) * 65521 & 0xFFFFFFFF
    assert mix(numbers).unique().numel() == numbers.numel()
    for bit in range(32):
        changed = mix(numbers) ^ mix(numbers ^ (1 << bit))
        shares = torch.stack([(changed >> out & 1).double().mean() for out in range(32)])
        assert (shares - 0.5).abs().max() < 0.06, bit


def test_python_ints_and_tensors_mix_alike() -> None:
    assert mix(123456789) == mix(torch.tensor(123456789)).item()
    constant = random_bits(torch.tensor(5), element_keys(6, CPU), Constant(), [2, 3], operator_key(0))
    assert constant.shape == (2, 3)


# --- what the operators make of the numbers
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "bool", "added", "causal", "causal_and_added"])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("num_key_heads", [1, 4])
def test_attention_with_dropout_is_attention_with_its_mask(
    mask: str, scale: float | None, num_key_heads: int
) -> None:
    """Written out here once more; without any weight dropped it is torch's own attention, only larger by what
    dropout keeps.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = normal(2, 4, 3, 8), normal(2, num_key_heads, 5, 8), normal(2, num_key_heads, 5, 8)
    numbers = torch.randint(2**32, (2, 4, 3, 5), generator=generator)
    given = (
        normal(2, 1, 3, 5)
        if "added" in mask
        else torch.rand(2, 1, 3, 5, generator=generator) < 0.7
        if mask == "bool"
        else None
    )
    if mask == "bool":
        given[..., 0] = True  # no row without any
    causal = "causal" in mask
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "scale": scale,
        "is_causal": causal,
        "dropout_p": 0.25,
        "attn_bias": given,
    }
    allowed = torch.ones(3, 5, dtype=torch.bool).tril() if causal else torch.ones(3, 5, dtype=torch.bool)
    bias = torch.zeros(2, 1, 3, 5, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    if given is not None:
        bias = bias.masked_fill(~given, float("-inf")) if mask == "bool" else bias + given
    repeated = [tensor.repeat_interleave(4 // num_key_heads, 1) for tensor in (key, value)]
    (kept,) = attention(lambda draw=0: torch.zeros_like(numbers), torch.float64, arguments)
    torch.testing.assert_close(
        kept * 0.75, F.scaled_dot_product_attention(query, *repeated, attn_mask=bias, scale=scale)
    )
    (dropped,) = attention(lambda draw=0: numbers, torch.float64, arguments)
    factor = 8**-0.5 if scale is None else scale
    weights = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", query, repeated[0]) * factor + bias, -1)
    torch.testing.assert_close(dropped, (weights * (numbers < 0.75 * 2**32) / 0.75) @ repeated[1])
    (none,) = attention(lambda draw=0: torch.full_like(numbers, 2**32 - 1), torch.float64, arguments)
    assert not none.any()


_MANY = torch.randint(2**32, (2, 200_000), generator=torch.Generator().manual_seed(5))
_EDGES = torch.tensor([[0, 2**32 - 1, 2**31], [2**32 - 1, 0, 2**31]])


@pytest.mark.parametrize(
    ("name", "arguments", "mean", "deviation", "low", "high"),
    [
        ("rand", {}, 0.5, 12**-0.5, 0.0, 1.0),
        ("uniform", {"from": 2.0, "to": 5.0}, 3.5, 3 * 12**-0.5, 2.0, 5.0),
        ("randn", {}, 0.0, 1.0, -7.0, 7.0),
        ("normal_functional", {"mean": 2.0, "std": 5.0}, 2.0, 5.0, -33.0, 37.0),
        ("exponential", {"lambd": 4.0}, 0.25, 0.25, 0.0, 5.0),
        ("randint", {"low": 3, "high": 9}, 5.5, (35 / 12) ** 0.5, 3, 8),
        ("randint", {"high": 2}, 0.5, 0.5, 0, 1),
        ("bernoulli", {"self": None, "p": 0.3}, 0.3, 0.21**0.5, 0.0, 1.0),
    ],
)  # fmt: skip
def test_drawn_values_have_their_distribution(
    name: str, arguments: dict[str, Any], mean: float, deviation: float, low: float, high: float
) -> None:
    dtype = torch.int64 if name == "randint" else torch.float64
    values = RANDOM_OPERATORS[name](lambda draw=0: _MANY[draw], dtype, arguments)
    assert values.dtype == dtype and abs(values.double().mean() - mean) < 5 * deviation / 200_000**0.5
    assert values.double().std() == pytest.approx(deviation, rel=0.02)
    edges = RANDOM_OPERATORS[name](lambda draw=0: _EDGES[draw], dtype, arguments)
    for found in (values, edges):
        assert found.isfinite().all() and low <= found.min() and found.max() <= high
    if name in ("rand", "uniform"):
        assert edges.max() < high and edges.min() == low
    if name == "randint":
        assert set(values.unique().tolist()) == set(range(int(low), int(high) + 1))


def test_bernoulli_of_a_tensor_takes_each_chance_by_itself() -> None:
    chances = torch.tensor([0.0, 0.25, 0.5, 1.0], dtype=torch.float64)
    numbers = torch.tensor([[0, 2**30 - 1, 2**31 - 1, 2**32 - 1], [0, 2**30, 2**31, 2**32 - 1]])
    values = [
        RANDOM_OPERATORS["bernoulli"](lambda draw=0, row=row: row, torch.float32, {"self": chances}).tolist()
        for row in numbers
    ]
    assert values == [[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]


def test_dropout_of_everything_and_its_mask() -> None:
    x = torch.ones(4, dtype=torch.float64)
    numbers = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1])
    for drop, kept, scale in (
        (0.5, [True, True, False, False], 2.0),
        (1.0, [False] * 4, 0.0),
        (0.75, [True, False, False, False], 4.0),
    ):
        value, mask = RANDOM_OPERATORS["native_dropout"](
            lambda draw=0: numbers, torch.float64, {"input": x, "p": drop}
        )
        assert mask.tolist() == kept and value.tolist() == [scale * flag for flag in kept]
