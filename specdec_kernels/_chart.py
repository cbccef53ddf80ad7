"""Line charts as SVG, without a plotting library."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

# SVG units of one panel.
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 460, 300, 58, 34, 16, 44
_LEGEND_LINE, _LEGEND_COLUMNS, _CHARACTER_WIDTH = 18, 3, 6.2
# Told apart also by most who see colours differently (Okabe and Ito).
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#888888")
_STYLE = (
    "text{font:11px system-ui,'DejaVu Sans',sans-serif;fill:#24292f}.title{font-weight:bold}"
    ".middle{text-anchor:middle}.end{text-anchor:end}"
    "path.grid{stroke:#d8dee4;stroke-width:1}polyline{fill:none;stroke-width:1.6}"
)

Points = Sequence[tuple[float, float]]


class Panel(NamedTuple):
    """One pair of axes.

    Attributes:
        title, x_label, y_label: texts.
        series: named lines, points in order of x; points that are not finite are left out.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Points]


class _Axis(NamedTuple):
    low: float
    high: float
    ticks: list[float]

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def line_chart(panels: Sequence[Panel]) -> str:
    """Draw panels side by side, each with its legend below.

    Args:
        panels: at least one; a panel without points keeps its axes.

    Returns:
        The SVG document, complete in itself.

    Example:
        >>> line_chart([Panel("loss", "step", "nats", {"all": [(1, 2.5), (2, 2.0)]})]).startswith("<svg ")
        True
    """
    lines = max(math.ceil(len(panel.series) / _LEGEND_COLUMNS) for panel in panels)
    width, height = _WIDTH * len(panels), _HEIGHT + lines * _LEGEND_LINE
    drawn = [f'<g transform="translate({i * _WIDTH} 0)">{_panel(panel)}</g>' for i, panel in enumerate(panels)]
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{_STYLE}</style>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def _panel(panel: Panel) -> str:
    series = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        for name, points in panel.series.items()
    }
    horizontal, vertical = (_axis([p[i] for points in series.values() for p in points]) for i in (0, 1))
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            round(_LEFT + horizontal.share(x) * (right - _LEFT), 1),
            round(bottom - vertical.share(y) * (bottom - _TOP), 1),
        )

    parts = [f'<text class="title" x="{_LEFT}" y="{_TOP - 14}">{escape(panel.title)}</text>']
    for tick in vertical.ticks:
        y = at(horizontal.low, tick)[1]
        parts.append(f'<path class="grid" d="M{_LEFT} {y}H{right}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 6}" y="{y + 4}">{tick:g}</text>')
    for tick in horizontal.ticks:
        x = at(tick, vertical.low)[0]
        parts.append(f'<path class="grid" d="M{x} {_TOP}V{bottom}"/>')
        parts.append(f'<text class="middle" x="{x}" y="{bottom + 15}">{tick:g}</text>')
    parts.append(f'<text class="middle" x="{(_LEFT + right) / 2}" y="{bottom + 32}">{escape(panel.x_label)}</text>')
    middle = (_TOP + bottom) / 2
    parts.append(f'<text class="middle" transform="translate(14 {middle}) rotate(-90)">{escape(panel.y_label)}</text>')
    for index, (name, points) in enumerate(series.items()):
        parts.extend(_line(index, name, [at(*p) for p in points], min(_LEGEND_COLUMNS, len(series))))
    return "\n".join(parts)


def _line(index: int, name: str, points: list[tuple[float, float]], columns: int) -> list[str]:
    """Return the line, a dot for each point when they are few, and the entry of a legend of so many columns."""
    colour = _COLOURS[index % len(_COLOURS)]
    row, column = divmod(index, columns)
    x, y = _LEFT + column * (_WIDTH - _LEFT) // columns, _HEIGHT + row * _LEGEND_LINE
    longest = int((_WIDTH - _LEFT) / columns / _CHARACTER_WIDTH) - 4
    shown = name if len(name) <= longest else name[: longest - 1] + "…"
    dots = [f'<circle cx="{px}" cy="{py}" r="2.4" fill="{colour}"/>' for px, py in points if len(points) <= 40]
    return [
        f'<polyline stroke="{colour}" points="{" ".join(f"{px},{py}" for px, py in points)}"/>',
        *dots,
        f'<path d="M{x} {y}h14" stroke="{colour}" stroke-width="2.4"/>',
        f'<text x="{x + 19}" y="{y + 4}"><title>{escape(name)}</title>{escape(shown)}</text>',
    ]


def _axis(values: list[float]) -> _Axis:
    """Return limits that hold all values, on round numbers a handful of which get a tick."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return _Axis(first * step, last * step, [float(f"{i * step:.12g}") for i in range(first, last + 1)])
