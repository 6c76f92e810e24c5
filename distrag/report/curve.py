"""Points in, one small line chart as SVG text out."""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 480, 220, 64, 24, 10


def draw_curve(points: Sequence[tuple[float, float]]) -> str:
    """Returns an SVG of y over x with three labelled values on each axis.

    Args:
        points: (x, y) pairs, finite, in order of x.
    """
    xs, ys = [float(x) for x, _ in points], [float(y) for _, y in points]
    x_low, x_high, y_low, y_high = min(xs), max(xs), min(ys), max(ys)
    x_span, y_span = (x_high - x_low) or 1.0, (y_high - y_low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / x_span * (_WIDTH - _LEFT - 10)
        return across, _HEIGHT - _BOTTOM - (y - y_low) / y_span * (_HEIGHT - _BOTTOM - _TOP)

    path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in zip(xs, ys, strict=True))
    marks = "".join(_mark(place, x_low, y_low + y_span * share, y_low + y_span * share) for share in (0.0, 0.5, 1.0))
    ends = [(x_low + x_span * share, anchor) for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))]
    steps = "".join(f'<text x="{place(x, y_low)[0]:.0f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{x:,.0f}</text>' for x, anchor in ends)
    dots = "".join('<circle cx="{:.1f}" cy="{:.1f}" r="2"/>'.format(*place(x, y)) for x, y in points) if len(points) <= 40 else ""
    style = 'font-size="11" fill="#5a6675" font-family="system-ui, sans-serif"'
    line = f'<polyline points="{path}" fill="none" stroke="#2f6fde" stroke-width="1.6"/><g fill="#2f6fde">{dots}</g>'
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{line}<g {style}>{marks}{steps}</g></svg>'


def _mark(place: object, x: float, y: float, value: float) -> str:
    assert callable(place)
    across, down = place(x, y)
    rule = f'<line x1="{across:.0f}" x2="{_WIDTH - 10}" y1="{down:.1f}" y2="{down:.1f}" stroke="#8892a0" stroke-opacity=".25"/>'
    return f'{rule}<text x="{across - 6:.0f}" y="{down + 4:.1f}" text-anchor="end">{value:.4g}</text>'
