"""Charts as SVG text, in the colours of the page's style sheet. No scripts, no fonts to fetch."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import msgspec

_WIDTH, _HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 14, 12, 38
_PLOT_WIDTH = _WIDTH - _LEFT - _RIGHT
_PLOT_HEIGHT = _HEIGHT - _TOP - _BOTTOM
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_WANTED_TICKS = 5
_LEGEND_WIDTH = 78
_LETTER_WIDTH = 6.2


class PlotSeries(msgspec.Struct, frozen=True):
    """Points of one line, by ascending x. ``colour`` is a class of the style sheet: ``a`` to ``d``.
    A ``stepped`` line keeps its y until the next x; a ``filled`` one is shaded below."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = "a"
    stepped: bool = False
    filled: bool = False


class Marker(msgspec.Struct, frozen=True):
    """Vertical line at ``x`` with a word beside it."""

    x: float
    text: str


def line_chart(
    series: Sequence[PlotSeries],
    *,
    x_title: str,
    y_title: str,
    label: str,
    y_max: float | None = None,
    x_max: float | None = None,
    markers: Sequence[Marker] = (),
    shaded_until: float = 0.0,
) -> str:
    """Draw lines over one pair of axes that start at 0. ``shaded_until`` greys out the start."""
    top = y_max or max((y for one in series for _, y in one.points), default=0.0)
    right = x_max or max((x for one in series for x, _ in one.points), default=0.0)
    frame = _Frame(right or 1.0, top or 1.0, exact_x=True, exact_y=y_max is not None)
    parts = [frame.shade(shaded_until)] if shaded_until > 0 else []
    parts += [frame.axes(x_title, y_title)]
    parts += [frame.line(one) for one in series]
    parts += _marked(frame, markers)
    if len(series) > 1:
        parts.append(_legend([(one.name, one.colour) for one in series]))
    return _svg(parts, label)


def bar_chart(
    edges: Sequence[float],
    counts: Sequence[float],
    *,
    x_title: str,
    y_title: str,
    label: str,
    markers: Sequence[Marker] = (),
) -> str:
    """Draw a histogram: ``counts[i]`` lies between ``edges[i]`` and ``edges[i + 1]``."""
    frame = _Frame(edges[-1], max(counts, default=0.0) or 1.0, exact_x=True, left=edges[0])
    bars = []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        x, end, y = frame.x(low), frame.x(high), frame.y(count)
        tip = f"{number(low)} to {number(high)} ms: {number(count)}"
        bars.append(
            f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{max(end - x - 0.6, 0.4):.1f}" '
            f'height="{max(frame.bottom - y, 0):.1f}"><title>{tip}</title></rect>'
        )
    parts = [frame.axes(x_title, y_title), *bars, *_marked(frame, markers)]
    return _svg(parts, label)


def number(value: float) -> str:
    """Format a number with at least three significant digits and no insignificant ones."""
    size = abs(value)
    if size >= 1_000_000:
        return f"{value / 1e6:.3g}M"
    if size >= 10_000:
        return f"{value / 1e3:.3g}k"
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


class _Frame:
    """Axes of a chart, and the position of values on it."""

    bottom = _TOP + _PLOT_HEIGHT

    def __init__(
        self,
        right: float,
        top: float,
        *,
        exact_x: bool = False,
        exact_y: bool = False,
        left: float = 0.0,
    ) -> None:
        self._x_ticks = _ticks(left, right)
        self._y_ticks = _ticks(0.0, top)
        self._left = left
        self._right = right if exact_x else self._x_ticks[-1]
        self._top = top if exact_y else max(self._y_ticks[-1], top)
        if self._right <= self._left:
            self._right = self._left + 1.0

    def x(self, value: float) -> float:
        share = (value - self._left) / (self._right - self._left)
        return _LEFT + min(max(share, 0.0), 1.0) * _PLOT_WIDTH

    def y(self, value: float) -> float:
        return _TOP + (1 - min(max(value / self._top, 0.0), 1.0)) * _PLOT_HEIGHT

    def has(self, x: float) -> bool:
        return self._left <= x <= self._right

    def shade(self, until: float) -> str:
        width = self.x(until) - _LEFT
        return (
            f'<rect class="shade" x="{_LEFT}" y="{_TOP}" width="{width:.1f}" '
            f'height="{_PLOT_HEIGHT}"/><text class="tick" x="{_LEFT + 4}" y="{_TOP + 11}">'
            "warm-up</text>"
        )

    def axes(self, x_title: str, y_title: str) -> str:
        lines = []
        for tick in self._y_ticks:
            y = self.y(tick)
            if tick > self._top:
                continue
            lines.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
                f'y2="{y:.1f}"/><text class="tick end" x="{_LEFT - 6}" y="{y + 3.5:.1f}">'
                f"{number(tick)}</text>"
            )
        for tick in self._x_ticks:
            if not self.has(tick):
                continue
            lines.append(
                f'<text class="tick middle" x="{self.x(tick):.1f}" y="{self.bottom + 14}">'
                f"{number(tick)}</text>"
            )
        lines.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{self.bottom}" '
            f'y2="{self.bottom}"/><text class="title middle" x="{_LEFT + _PLOT_WIDTH / 2:.0f}" '
            f'y="{_HEIGHT - 6}">{html.escape(x_title)}</text>'
            f'<text class="title middle" transform="translate(11 {_TOP + _PLOT_HEIGHT / 2:.0f}) '
            f'rotate(-90)">{html.escape(y_title)}</text>'
        )
        return "".join(lines)

    def line(self, series: PlotSeries) -> str:
        if not series.points:
            return ""
        path: list[str] = []
        y_before = 0.0
        for place, (x_value, y_value) in enumerate(series.points):
            x, y = self.x(x_value), self.y(y_value)
            if place and series.stepped:
                path.append(f"{x:.1f} {y_before:.1f}")
            path.append(f"{x:.1f} {y:.1f}")
            y_before = y
        drawn = f'<path class="line {series.colour}" d="M{" L".join(path)}"/>'
        if not series.filled:
            return drawn
        first, last = self.x(series.points[0][0]), self.x(series.points[-1][0])
        area = f"M{first:.1f} {self.bottom} L{' L'.join(path)} L{last:.1f} {self.bottom} Z"
        return f'<path class="area {series.colour}" d="{area}"/>{drawn}'


def _marked(frame: _Frame, markers: Sequence[Marker]) -> list[str]:
    """Return lines with their words, each word a line lower than the previous one, so that words do
    not overlap."""
    drawn = []
    for place, marker in enumerate(m for m in markers if frame.has(m.x)):
        x = frame.x(marker.x)
        turned = x > _LEFT + _PLOT_WIDTH * 0.75
        drawn.append(
            f'<line class="marker" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{frame.bottom}"/>'
            f'<text class="tick{" end" if turned else ""}" x="{x + (-4 if turned else 4):.1f}" '
            f'y="{_TOP + 10 + 12 * place}">{html.escape(marker.text)}</text>'
        )
    return drawn


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return the names of lines in the upper right corner, on an opaque background."""
    longest = max(len(name) for name, _ in entries)
    width = max(_LEGEND_WIDTH, 34 + math.ceil(_LETTER_WIDTH * longest))
    left, height = _WIDTH - _RIGHT - width, 14 * len(entries) + 6
    drawn = [f'<rect class="back" x="{left}" y="{_TOP}" width="{width}" height="{height}"/>']
    for place, (name, colour) in enumerate(entries):
        y = _TOP + 13 + 14 * place
        drawn.append(
            f'<line class="line {colour}" x1="{left + 6}" x2="{left + 22}" y1="{y - 4}" '
            f'y2="{y - 4}"/><text class="tick" x="{left + 28}" y="{y}">{html.escape(name)}</text>'
        )
    return "".join(drawn)


def _ticks(low: float, high: float) -> list[float]:
    """Return round values from about ``low`` to at least ``high``."""
    span = (high - low) or 1.0
    raw = span / _WANTED_TICKS
    size = 10 ** math.floor(math.log10(raw))
    step = next(factor * size for factor in _STEPS if factor * size >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    count = math.ceil((high - first * step) / step - 1e-9) + 1
    return [(first + place) * step for place in range(max(count, 2))]


def _svg(parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
