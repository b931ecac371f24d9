"""A report as one page of HTML with a drawing (SVG): parts, cuts, and bytes on every edge.

The page stands alone: no scripts, no fonts, no files beside it.
"""

from __future__ import annotations

from html import escape

from .report import Call, Part, Report

_WIDTH, _BOX, _GAP, _HIGH, _STEP = 980, 330, 200, 54, 118
_LEFT = 40
_RIGHT = _LEFT + _BOX + _GAP
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; color: #1c2b1e }
table { border-collapse: collapse; margin: 1em 0; width: 100% }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid #d8e2d8 }
th:first-child, td:first-child { text-align: left }
text { font: 13px system-ui, sans-serif; fill: #1c2b1e }
.small { font-size: 11.5px; fill: #4a5c4c }
"""
_ARROWS = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#4a5c4c"/></marker></defs>'
)


def page(report: Report) -> str:
    """The whole page."""
    title = escape(f"{report.name}: {len(report.parts)} parts, {len(report.calls)} attention calls")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{escape(summary(report))}</p>"
        f"{drawing(report)}{_parts_table(report)}{_calls_table(report)}</html>\n"
    )


def summary(report: Report) -> str:
    """The model in one line."""
    return (
        f"{report.parameters:,} parameters, {_bytes(report.weight_bytes)} in {report.dtype}; per "
        f"token {_bytes(report.kv_bytes)} of KV cache are stored and {_bytes(report.hop_bytes)} "
        f"cross to attention and back"
    )


def drawing(report: Report) -> str:
    """Parts from top to bottom; attention beside the cuts that it answers."""
    shapes = [_ARROWS]
    for part in report.parts:
        top = 20 + part.index * _STEP
        shapes.append(_box(_LEFT, top, "#e3f1e3", f"part {part.index}", _part_line(part)))
        if part.index + 1 == len(report.parts):
            continue
        shapes.append(_arrow(_LEFT + 60, top + _HIGH, _LEFT + 60, top + _STEP))
        shapes.append(_small(_LEFT + 70, top + _HIGH + 36, f"carry {_bytes(part.carry_bytes)}"))
        if report.at_attention:
            shapes += _hop(report.calls[part.index], top)
    height = 40 + (len(report.parts) - 1) * _STEP + _HIGH
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img" aria-label="parts and cuts">{"".join(shapes)}</svg>'
    )


def _hop(call: Call, top: int) -> list[str]:
    middle, end = top + _HIGH // 2, _LEFT + _BOX
    return [
        _box(_RIGHT, top, "#f3ead2", f"attention {call.layer}", spec_line(call)),
        _arrow(end, middle, _RIGHT, middle),
        _small(end + 30, middle - 6, f"q, k, v {_bytes(call.there_bytes)}"),
        _arrow(_RIGHT + 60, top + _HIGH, end, top + _STEP + 10),
        _small(end + 60, top + _HIGH + 36, f"o {_bytes(call.back_bytes)}"),
    ]


def spec_line(call: Call) -> str:
    """A call's spec in a few words."""
    spec = call.spec
    text = f"{call.heads} heads on {spec['kv_heads']}, {spec['k_dim']}"
    text += f" and {spec['v_dim']}" if spec["v_dim"] != spec["k_dim"] else ""
    for field, label in (("window", "window"), ("softcap", "soft-cap")):
        text += f", {label} {spec[field]:g}" if spec[field] is not None else ""
    for field, label in (("sinks", "sinks"), ("alibi_slopes", "ALiBi")):
        text += f", {label}" if spec[field] else ""
    return text


def _part_line(part: Part) -> str:
    return f"{_bytes(part.weight_bytes)} of weights, {_count(part.flops)}FLOP per token"


def _box(left: int, top: int, fill: str, title: str, line: str) -> str:
    return (
        f'<rect x="{left}" y="{top}" width="{_BOX}" height="{_HIGH}" rx="8" fill="{fill}" '
        f'stroke="#9db59f"/><text x="{left + 12}" y="{top + 22}">{escape(title)}</text>'
        + _small(left + 12, top + 41, line)
    )


def _arrow(x0: int, y0: int, x1: int, y1: int) -> str:
    return f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="#4a5c4c" marker-end="url(#a)"/>'


def _small(x: int, y: int, text: str) -> str:
    return f'<text class="small" x="{x}" y="{y}">{escape(text)}</text>'


def _table(headings: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


PART_HEADINGS = ["part", "parameters", "weights", "FLOP/token", "products", "carry/token"]
CALL_HEADINGS = ["attention", "spec", "KV/token", "q, k, v", "o", "FLOP per token seen"]


def part_rows(report: Report) -> list[list[str]]:
    return [
        [str(p.index), f"{p.parameters:,}", _bytes(p.weight_bytes), _count(p.flops),
         str(p.products), _bytes(p.carry_bytes)]
        for p in report.parts
    ]  # fmt: skip


def call_rows(report: Report) -> list[list[str]]:
    return [
        [str(c.layer), spec_line(c), _bytes(c.kv_bytes), _bytes(c.there_bytes),
         _bytes(c.back_bytes), _count(c.flops_per_context_token)]
        for c in report.calls
    ]  # fmt: skip


def _parts_table(report: Report) -> str:
    return _table(PART_HEADINGS, part_rows(report))


def _calls_table(report: Report) -> str:
    return _table(CALL_HEADINGS, call_rows(report))


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _count(count: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} "
