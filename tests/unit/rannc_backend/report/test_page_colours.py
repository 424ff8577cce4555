"""The page's colours can be told apart by everyone: in light and dark, for each kind of colour vision, and
texts on them can be read.

Colour vision without one kind of cone is simulated by the matrices of Machado, Oliveira and Fernandes (2009)
for the severest case, in linear RGB. Distances are those of OKLab, in which 0.02 is just seen between two
large areas; contrasts are those of WCAG 2.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

STYLE = (Path(__file__).resolve().parents[4] / "rannc_backend/report/templates/plan.css").read_text(
    encoding="utf-8"
)
MIN_DISTANCE = 0.12
VISIONS = {
    "of most people": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "without red cones": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "without green cones": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "without blue cones": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
TOGETHER = (
    ("forward", "backward", "allreduce", "transfer", "idle"),
    ("parameter", "gradient", "optimizer", "activation", "buffer", "workspace", "idle"),
)
Linear = tuple[float, float, float]


def variables(theme: str) -> dict[str, str]:
    """The custom properties of a theme; dark changes some of light."""
    blocks = [
        dict(re.findall(r"--([\w-]+): ([^;]+);", block))
        for block in re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    ]
    assert len(blocks) == 2
    return blocks[0] if theme == "light" else blocks[0] | blocks[1]


def linear(colour: str) -> Linear:
    assert re.fullmatch(r"#[0-9a-f]{6}", colour), colour
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def seen(colour: Linear, vision: str) -> Linear:
    return tuple(
        min(max(sum(a * b for a, b in zip(row, colour, strict=True)), 0.0), 1.0) for row in VISIONS[vision]
    )


def oklab(colour: Linear) -> tuple[float, float, float]:
    red, green, blue = colour
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def of_oklch(lightness: float, chroma: float, hue: float) -> Linear:
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    parts = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )
    return tuple(min(max(part, 0.0), 1.0) for part in parts)


def contrast(one: Linear, other: Linear) -> float:
    lights = sorted(0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2] for colour in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_that_stand_together_are_far_from_each_other(theme: str, vision: str) -> None:
    colours = variables(theme)
    for names in TOGETHER:
        places = {name: oklab(seen(linear(colours[name]), vision)) for name in names}
        near = [
            (a, b)
            for a, b in itertools.combinations(names, 2)
            if math.dist(places[a], places[b]) < MIN_DISTANCE
        ]
        assert not near


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_can_be_read(theme: str) -> None:
    colours = variables(theme)
    pairs = [
        (text, ground)
        for text in ("ink", "soft", "accent", "good", "danger")
        for ground in ("ground", "card")
    ]
    pairs += [("on-forward", "forward"), ("on-backward", "backward"), ("on-tip", "tip")]
    poor = [pair for pair in pairs if contrast(*(linear(colours[name]) for name in pair)) < 4.5]
    assert not poor
    lightness, chroma = re.fullmatch(r"([\d.]+)% ([\d.]+)", colours["stage"]).groups()
    for hue in range(360):
        stage = of_oklch(float(lightness) / 100, float(chroma), hue)
        assert contrast(stage, linear(colours["on-stage"])) >= 4.5, f"the number of a stage on hue {hue}"


def test_kinds_differ_in_pattern_too() -> None:
    """Printed in grey, or by whoever sees no colours."""
    for names in TOGETHER:
        rules = [re.search(rf"^\.{name} \{{ background: (.*?);", STYLE, re.MULTILINE)[1] for name in names]
        patterns = [re.sub(r"var\(--(?!(light-)?stripe)[\w-]+\)", "", rule).strip() for rule in rules]
        plain = [name for name, pattern in zip(names, patterns, strict=True) if not pattern]
        assert len(plain) == 2 and plain[-1] == "idle"  # one kind is plain, and the ground
        assert len(set(patterns)) == len(names) - 1
