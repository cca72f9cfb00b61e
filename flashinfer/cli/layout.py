# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer layout`: draw the bytes of a KV page, and where its vectors go in another format.

One cell is one 16-byte vector, one row is 128 bytes of memory. A cell's colour is its head; its text says
which tokens, and which elements of the head, lie in it.
"""

from __future__ import annotations

import argparse
import colorsys
import dataclasses
import sys
from pathlib import Path

import torch

from flashinfer.core.errors import InvalidArgumentError
from flashinfer.kv.format import DTYPES, KINDS, VECTOR_BYTES, PageFormat

# 8 vectors are a cache line of an AMD GPU's L2.
_COLUMNS = 8
_ROW_BYTES = _COLUMNS * VECTOR_BYTES
_CELL_W, _CELL_H = 46, 23
# How far a curve runs straight from a cell's top or bottom.
_REACH = 110
_MARGIN, _TOP, _LEFT, _BETWEEN = 24, 92, 52, 190
_MAX_VECTORS = 4096
_CHOSEN_PER_SIDE = 8
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_INK, _FAINT = "#1f2328", "#59636e"
# Hues far apart first; further heads repeat them.
_HUES = (212, 24, 145, 280, 48, 330, 180, 0)
_KEY, _VALUE = 0, 1


@dataclasses.dataclass(frozen=True)
class Cell:
    """What lies in one 16-byte vector: pairs of first and last index."""

    kv: tuple[int, int]
    head: int
    tokens: tuple[int, int]
    elements: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Travel:
    """One vector of the source page, and the destination's vectors that get its elements."""

    source: int
    destinations: tuple[int, ...]
    kv: int
    head: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    default = " (default: %(default)s)"
    parser.add_argument("--format", choices=KINDS, default="shuffled", help=f"kind of the page{default}")
    parser.add_argument("--to", choices=KINDS, help="draw this kind beside it, and where sixteen vectors travel")
    parser.add_argument("--heads", type=int, default=2, help=f"KV heads{default}")
    parser.add_argument("--tokens", type=int, default=16, help=f"tokens of the page{default}")
    parser.add_argument("--dim", type=int, default=32, help=f"head size{default}")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help=f"element type{default}")
    parser.add_argument("-o", "--output", metavar="FILE", help="SVG file (default: standard output)")


def run(args: argparse.Namespace) -> int:
    """Write the drawing."""
    source = PageFormat(args.format, args.dtype, args.heads, args.tokens, args.dim)
    destination = None if args.to is None else dataclasses.replace(source, kind=args.to)
    svg = draw(source, destination)
    if args.output is None:
        sys.stdout.write(svg)
        return 0
    try:
        Path(args.output).write_text(svg, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"layout: --output must be writable, got {error}; name another file") from error
    return 0


def cells_of(page: PageFormat) -> list[Cell]:
    """The page's 16-byte vectors in memory order."""
    _check_size(page)
    H, N, D = page.num_kv_heads, page.page_size, page.head_dim
    order = page.offsets().flatten().argsort()
    index = torch.stack(torch.unravel_index(order, (2, H, N, D)), dim=1).tolist()
    cells = []
    for first in range(0, len(index), page.x):
        kv, head, tokens, elements = zip(*index[first : first + page.x], strict=True)
        cells.append(Cell((min(kv), max(kv)), head[0], (min(tokens), max(tokens)), (min(elements), max(elements))))
    return cells


def travels(src: PageFormat, dst: PageFormat) -> list[Travel]:
    """Eight vectors of the first head's K and eight of the last head's V, in memory order.

    Each eight is the start of an x-by-x tile of tokens and elements, the unit that conversions transpose.
    """
    at = src.offsets() // VECTOR_BYTES
    to = dst.offsets() // VECTOR_BYTES
    chosen = []
    for kv, head in ((_KEY, 0), (_VALUE, src.num_kv_heads - 1)):
        # The last tile of elements: in most formats it is nearest to the other page.
        tile = sorted({*at[kv, head, : src.x, -src.x :].flatten().tolist()})
        rest = sorted({*at[kv, head].flatten().tolist()} - {*tile})
        for vector in sorted([*tile, *rest][:_CHOSEN_PER_SIDE]):
            reached = sorted({*to[at == vector].tolist()})
            chosen.append(Travel(vector, tuple(reached), kv, head))
    return chosen


def draw(source: PageFormat, destination: PageFormat | None = None) -> str:
    """The drawing as SVG text: one page, or two with arrows from the first to the second."""
    rows = -(-source.page_bytes // _ROW_BYTES)
    page_w = _COLUMNS * _CELL_W
    pages = 1 if destination is None else 2
    width = 2 * _MARGIN + _LEFT + page_w + (pages - 1) * (_BETWEEN + page_w)
    height = _TOP + rows * _CELL_H + 46 + 20 * _legend_rows(source) + 16 * pages
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{_FONT}" role="img">',
        f"<title>{_title(source, destination)}</title>",
        f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
    ]
    left = _MARGIN + _LEFT
    right = left + page_w + _BETWEEN
    moves = [] if destination is None else travels(source, destination)
    drawn = [(source, left, {move.source: move for move in moves})]
    if destination is not None:
        drawn.append((destination, right, {v: move for move in moves for v in move.destinations}))
    # Arrows over cells and under text, so that both can be read.
    for page, x, marked in drawn:
        parts += _cells(page, x, marked, faded=bool(moves))
    parts += _arrows(moves, left, right)
    for page, x, marked in drawn:
        parts += _labels(page, x, marked, faded=bool(moves))
    parts += _addresses(rows, source.page_bytes)
    parts += _legend(source, left, _TOP + rows * _CELL_H + 30, bool(moves))
    return "\n".join([*parts, "</svg>", ""])


def _check_size(page: PageFormat) -> None:
    vectors = -(-page.page_bytes // VECTOR_BYTES)
    if vectors > _MAX_VECTORS:
        raise InvalidArgumentError(
            f"layout: page must be at most {_MAX_VECTORS} vectors of {VECTOR_BYTES} bytes, got {vectors}; "
            "draw fewer heads or tokens: the pattern repeats"
        )


def _title(source: PageFormat, destination: PageFormat | None) -> str:
    shape = f"{source.num_kv_heads} heads, {source.page_size} tokens, head size {source.head_dim}, {source.dtype}"
    kinds = source.kind if destination is None else f"{source.kind} to {destination.kind}"
    return f"KV page, {kinds}: {shape}"


def _cells(page: PageFormat, left: int, marked: dict[int, Travel], *, faded: bool) -> list[str]:
    parts = []
    for vector, cell in enumerate(cells_of(page)):
        x, y = _corner(vector, left)
        fill = _colour(cell.kv[0], cell.head, *_fill(cell.kv[0], faded and vector not in marked))
        move = marked.get(vector)
        outline = "" if move is None else f' stroke="{_colour(move.kv, move.head, 0.30, 0.75)}" stroke-width="1.8"'
        parts.append(
            f'<rect x="{x + 1}" y="{y + 1}" width="{_CELL_W - 2}" height="{_CELL_H - 2}" rx="3" '
            f'fill="{fill}"{outline}/>'
        )
    for start, _ in page.planes[1:]:
        if start % _ROW_BYTES == 0:
            y = _TOP + start // _ROW_BYTES * _CELL_H
            parts.append(
                f'<line x1="{left - 8}" y1="{y}" x2="{left + _COLUMNS * _CELL_W + 8}" y2="{y}" '
                f'stroke="{_INK}" stroke-width="1.6"/>'
            )
    return parts


def _labels(page: PageFormat, left: int, marked: dict[int, Travel], *, faded: bool) -> list[str]:
    parts = [
        _text(left, _TOP - 48, page.kind, size=19, weight=700),
        _text(left, _TOP - 29, page.shape, size=11.5, fill=_FAINT),
        _text(left, _TOP - 10, f"{page.page_bytes} bytes, {_ROW_BYTES} to a row", size=10, fill=_FAINT),
    ]
    tokens: list[str] = []
    elements: list[str] = []
    for vector, cell in enumerate(cells_of(page)):
        x, y = _corner(vector, left)
        centre = x + _CELL_W // 2
        side = "KV" if cell.kv[0] != cell.kv[1] else "KV"[cell.kv[0]]
        # Where arrows pass, pale cells' text gets a halo; chosen cells stay free of arrows.
        ink = f' fill="{_INK}" stroke="none"' if vector in marked else ""
        tokens.append(f'<text x="{centre}" y="{y + 10.5:g}"{ink}>t{_span(cell.tokens)}</text>')
        elements.append(f'<text x="{centre}" y="{y + 19}"{ink}>{side} {_span(cell.elements)}</text>')
    halo = f'fill="{_FAINT}" stroke="#ffffff" stroke-opacity="0.8" stroke-width="2" paint-order="stroke"'
    ink_only = f'fill="{_INK}"'
    style = f'text-anchor="middle" {halo if faded else ink_only}'
    parts += [f'<g {style} font-size="9.5" font-weight="700">', *tokens, "</g>"]
    parts += [f'<g {style} font-size="7.5">', *elements, "</g>"]
    return parts


def _arrows(moves: list[Travel], left: int, right: int) -> list[str]:
    lines: list[str] = []
    heads: list[str] = []
    for first in range(0, len(moves), _CHOSEN_PER_SIDE):
        group = moves[first : first + _CHOSEN_PER_SIDE]
        _bundle(group, left, right, lines, heads)
    return lines + heads


def _bundle(group: list[Travel], left: int, right: int, lines: list[str], heads: list[str]) -> None:
    """Cells in one row are left and entered from above or below: no arrow runs through its neighbours."""
    sources = [move.source for move in group]
    targets = [vector for move in group for vector in move.destinations]
    sinking = _mean_row(targets) > _mean_row(sources)
    for number, move in enumerate(group):
        # Shades within a head's hue, so that a line can be followed through a bundle.
        stroke = _colour(move.kv, move.head, 0.28 + 0.34 * number / _CHOSEN_PER_SIDE, 0.8)
        whole = len(move.destinations) == 1
        style = f'stroke-width="{1.8 if whole else 0.8}" stroke-opacity="{0.9 if whole else 0.55}"'
        x0, y0 = _corner(move.source, left)
        if _in_one_row(sources):
            x0, y0 = x0 + _CELL_W // 2, y0 + (_CELL_H - 1 if sinking else 1)
            leave = f"{x0} {y0 + (_REACH if sinking else -_REACH)}"
        else:
            x0, y0 = x0 + _CELL_W - 1, y0 + _CELL_H // 2
            leave = f"{(x0 + right) // 2} {y0}"
        heads.append(f'<circle cx="{x0}" cy="{y0}" r="2.4" fill="{stroke}"/>')
        for vector in move.destinations:
            x1, y1 = _corner(vector, right)
            if _in_one_row(targets):
                x1, y1 = x1 + _CELL_W // 2, y1 + (1 if sinking else _CELL_H - 1)
                enter = f"{x1} {y1 - (_REACH if sinking else -_REACH)}"
                tip = f"l-3 {-6 if sinking else 6} h6 z"
            else:
                x1, y1 = x1 + 1, y1 + _CELL_H // 2
                enter = f"{(x0 + x1) // 2} {y1}"
                tip = "l-6 -3 v6 z"
            lines.append(f'<path d="M{x0} {y0} C{leave} {enter} {x1} {y1}" fill="none" stroke="{stroke}" {style}/>')
            heads.append(f'<path d="M{x1} {y1} {tip}" fill="{stroke}"/>')


def _mean_row(vectors: list[int]) -> float:
    return sum(vector // _COLUMNS for vector in vectors) / len(vectors)


def _in_one_row(vectors: list[int]) -> bool:
    return len({*vectors}) > 1 and len({vector // _COLUMNS for vector in vectors}) == 1


def _addresses(rows: int, page_bytes: int) -> list[str]:
    step = 1 if rows <= 40 else 4
    parts = [
        _text(_MARGIN, _TOP + row * _CELL_H + 15, f"{row * _ROW_BYTES:#06x}", size=9, fill=_FAINT)
        for row in range(0, rows, step)
    ]
    return [*parts, _text(_MARGIN, _TOP + rows * _CELL_H + 12, f"{page_bytes:#06x}", size=9, fill=_FAINT)]


def _legend(page: PageFormat, left: int, top: int, moving: bool) -> list[str]:
    parts = []
    for head in range(_legend_heads(page)):
        for kv in (_KEY, _VALUE):
            x, y = left + (2 * (head % 2) + kv) * _COLUMNS * _CELL_W // 4, top + head // 2 * 20
            fill = _colour(kv, head, *_fill(kv, False))
            parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="12" rx="2" fill="{fill}"/>')
            parts.append(_text(x + 17, y + 1, f"{'KV'[kv]} head {head}", size=10.5))
    notes = ["A cell is 16 bytes: tokens above, elements of the head below."]
    if moving:
        notes += ["Thick: a vector moves whole. Thin: its elements part."]
    y = top + 20 * _legend_rows(page)
    return parts + [_text(left, y + 4 + 16 * i, note, size=10, fill=_FAINT) for i, note in enumerate(notes)]


def _legend_heads(page: PageFormat) -> int:
    return min(page.num_kv_heads, len(_HUES))


def _legend_rows(page: PageFormat) -> int:
    return -(-_legend_heads(page) // 2)


def _corner(vector: int, left: int) -> tuple[int, int]:
    row, column = divmod(vector, _COLUMNS)
    return left + column * _CELL_W, _TOP + row * _CELL_H


def _span(bounds: tuple[int, int]) -> str:
    first, last = bounds
    return str(first) if first == last else f"{first}-{last}"


def _fill(kv: int, dim: bool) -> tuple[float, float]:
    """Lightness and saturation of a cell: K stronger than V, and both pale where something else matters."""
    if dim:
        return (0.91, 0.55) if kv == _KEY else (0.96, 0.60)
    return (0.76, 0.80) if kv == _KEY else (0.88, 0.85)


def _colour(kv: int, head: int, lightness: float, saturation: float) -> str:
    hue = _HUES[head % len(_HUES)] + 8 * kv
    channels = colorsys.hls_to_rgb((hue % 360) / 360, lightness, saturation)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def _text(x: float, y: float, text: str, *, size: float, weight: int = 400, fill: str = _INK) -> str:
    style = f'font-size="{size:g}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{text}</text>'
