"""Numbers and names as short text.

In: seconds, bytes, shares, ranks, names. Out: text for tables and for the page, all printable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rannc_backend.errors import BYTES_PER_GB
from rannc_backend.ir.plan import Plan
from rannc_backend.settings.choices import MARKED, SEGMENTS, SEGMENTS_BUDGET

BYTES_PER_MB = 1024**2
_MAX_MEMORY_BYTES = 2**50


def seconds_text(seconds: float) -> str:
    """Three digits with the unit that suits: "1.23 s", "45.6 ms", "7.89 us"."""
    if seconds == 0:
        return "0"
    # The unit is that of the rounded number: 0.9996 s is "1 s", not "1e+03 ms".
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if float(f"{seconds * factor:.3g}") >= 1 or unit == "us":
            value = seconds * factor
            return f"{_digits(value)} {unit}"
    raise AssertionError("microseconds take what is left")


def _digits(value: float) -> str:
    """Three digits, all of them before the point: "12 346"."""
    return f"{value:.3g}" if value < 999.5 or value >= 1e9 else f"{value:,.0f}".replace(",", " ")


def size_text(num_bytes: float) -> str:
    """Three digits in GB, MB or KB (1024 of each other): "12.3 GB"."""
    if num_bytes == 0:
        return "0"
    for factor, unit in ((BYTES_PER_GB, "GB"), (BYTES_PER_MB, "MB")):
        if num_bytes >= 0.9995 * factor:
            value = num_bytes / factor
            return f"{_digits(value)} {unit}"
    return f"{num_bytes / 1024:.3g} KB"


def rate_text(bytes_per_second: float) -> str:
    """Three digits in decimal units, as data sheets have them: "25 GB/s"."""
    for factor, unit in ((1e12, "TB/s"), (1e9, "GB/s")):
        if bytes_per_second >= 0.9995 * factor:
            return f"{bytes_per_second / factor:.3g} {unit}"
    return f"{bytes_per_second / 1e6:.3g} MB/s"


def percent_text(share: float) -> str:
    """ "23 %"; one digit after the point below 10 %."""
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.1f} %"


def change_text(before: float, after: float) -> str:
    """How `after` differs from `before`: "+12 %", "-3.4 %", "same"; "2.3 x" and more as a factor."""
    if before == after:
        return "same"
    if before <= 0:
        return "new"
    change = after / before - 1
    if change >= 1:
        return f"{after / before:.3g} x"
    if abs(change) < 0.0005:
        return "same"
    return f"{'+' if change > 0 else '-'}{percent_text(abs(change))}"


def ranges_text(numbers: Iterable[int]) -> str:
    """Numbers with runs drawn together: "0-3, 8, 10-11"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def replicas_text(replicas: Sequence[int]) -> str:
    """Replicas by stage, equal neighbours counted: "8", "4 x 2" (four stages of two), "2, 3 x 1"."""
    runs: list[list[int]] = []
    for count in replicas:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return ", ".join(str(count) if number == 1 else f"{number} x {count}" for number, count in runs)


def stages_text(replicas: Sequence[int]) -> str:
    """ "1 stage on 8 ranks", "4 stages on 2 ranks each", "4 stages on 2, 3 x 1 ranks"."""
    stages = count_text(len(replicas), "stage")
    if len(set(replicas)) == 1:
        return f"{stages} on {count_text(replicas[0], 'rank')}{' each' if len(replicas) > 1 else ''}"
    return f"{stages} on {replicas_text(replicas)} ranks"


def kept_text(recompute: Sequence[float], told: str = "") -> str:
    """Shares of the activations that are kept: "all", "50 %", "segments", "none"; from-to where stages differ. `told`:
    `Plan.told_recompute`; with it "marked", or "around modules".
    """
    low, high = min(recompute), max(recompute)
    if low == high and low in (0, 1):
        return "all" if low else "none"
    segments = (MARKED if told == MARKED else "around modules") if told else SEGMENTS
    ends = [segments if share == SEGMENTS_BUDGET else percent_text(share) for share in (low, high)]
    return " to ".join(dict.fromkeys(ends))


def told_text(told: str) -> str:
    """What the user wants computed again, of `Plan.told_recompute`; "" where that is nothing."""
    if not told:
        return ""
    return (
        "recompute of all but marked tensors" if told == MARKED else f"recompute of modules {printable(told)}"
    )


def zero_text(zero_stage: int, num_groups: int) -> str:
    """Who updates a parameter of a stage with replicas."""
    if not zero_stage:
        return "no ZeRO"
    of = f"each of {num_groups} groups of replicas" if num_groups > 1 else "the replicas"
    return f"ZeRO {zero_stage} (one of {of} updates a parameter)"


def name_text(plan: Plan) -> str:
    """The name of the job, where it has one, and of the model."""
    return ", ".join(filter(None, (printable(plan.plan_name), printable(plan.model_name)))) or "model"


def limit_text(num_bytes: int) -> str:
    """A limit of memory; the option ignore_memory makes it more than any device has."""
    return "any memory (ignore_memory)" if num_bytes > _MAX_MEMORY_BYTES else size_text(num_bytes)


def formats_text(plan: Plan) -> str:
    """What travels in fewer bits, and what that saves; "" where all travels as it is."""
    formats = plan.formats
    if formats.are_exact:
        return ""
    kinds = (
        ("values between stages", formats.boundary_dtype, formats.saved_message_bytes),
        ("sums of gradients", formats.gradient_dtype, formats.saved_gradient_bytes),
    )
    found = [f"{name} as {dtype} ({size_text(size)} less)" for name, dtype, size in kinds if dtype != "same"]
    return f"{', '.join(found)}, which saves {seconds_text(formats.saved_seconds)} of a step; not exact"


def row_gradients_text(plan: Plan) -> str:
    """What keeping gradients of embeddings as rows makes of what ranks reduce of them; "" where none are."""
    formats = plan.formats
    if not formats.num_row_gradients:
        return ""
    text = f"{count_text(formats.num_row_gradients, 'gradient')} as rows"
    if not formats.dense_gradient_bytes:
        return text
    at_most, dense = (size_text(size) for size in (formats.row_gradient_bytes, formats.dense_gradient_bytes))
    return f"{text} (at most {at_most} reduced in a step, of the same as dense ones {dense})"


def offload_text(plan: Plan) -> str:
    """What keeping parameters on the host frees of a device, on the rank where it frees most, and what it costs."""
    if plan.offload == "none":
        return "none"
    lanes = [[plan.stages[index].predicted for index in lane] for lane in plan.lanes]
    freed = max(
        sum(cost.host_bytes - cost.parameter_bytes - cost.gradient_bytes for cost in lane) for lane in lanes
    )
    return f"frees {size_text(freed)} on a device, and copies take {seconds_text(plan.offload_seconds)} of a step"


def count_text(number: int, singular: str, plural: str | None = None) -> str:
    """ "1 stage", "2 stages"."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def printable(text: str) -> str:
    """`text` with every character that a terminal or a page might act on written as its code."""
    return "".join(
        character
        if character.isprintable()
        else character.encode("unicode_escape", "backslashreplace").decode("ascii")
        for character in text
    )
