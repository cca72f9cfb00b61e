# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The drawing says what the page holds: cells, texts and arrows are read back from the SVG."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from flashinfer.cli import main
from flashinfer.cli.layout import Cell, cells_of, draw, travels
from flashinfer.core.errors import InvalidArgumentError
from flashinfer.kv.format import KINDS, PageFormat

ROOT = Path(__file__).resolve().parents[3]
README_COMMAND = "layout --format standard --heads 2 --tokens 16 --dim 32 --dtype bfloat16 --to shuffled -o"
README_IMAGE = ROOT / "docs" / "images" / "standard-to-shuffled.svg"


def page(kind: str, dtype: str = "bfloat16", heads: int = 2, tokens: int = 16, dim: int = 32) -> PageFormat:
    return PageFormat(kind, dtype, heads, tokens, dim)


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in elements(svg, "text")]


def test_cells_of_a_standard_page_by_hand() -> None:
    """A token is four vectors of K, then four of V; head 1 begins after sixteen tokens."""
    cells = cells_of(page("standard"))
    assert len(cells) == 256
    assert cells[0] == Cell((0, 0), 0, (0, 0), (0, 7))
    assert cells[5] == Cell((1, 1), 0, (0, 0), (8, 15))
    assert cells[8] == Cell((0, 0), 0, (1, 1), (0, 7))
    assert cells[128] == Cell((0, 0), 1, (0, 0), (0, 7))


def test_cells_of_a_shuffled_page_by_hand() -> None:
    """K: sixteen tokens' vectors side by side. V: a vector is one element of eight tokens."""
    cells = cells_of(page("shuffled"))
    assert cells[3] == Cell((0, 0), 0, (3, 3), (0, 7))
    assert cells[16] == Cell((0, 0), 0, (0, 0), (8, 15))
    assert cells[128] == Cell((1, 1), 0, (0, 7), (0, 0))
    assert cells[128 + 32 + 5] == Cell((1, 1), 0, (8, 15), (5, 5))
    assert cells[255] == Cell((1, 1), 1, (8, 15), (31, 31))


def test_a_vector_that_holds_the_end_of_k_and_the_start_of_v() -> None:
    cells = cells_of(page("standard", dim=20))
    assert cells[2] == Cell((0, 1), 0, (0, 0), (0, 19))
    assert "KV 0-19" in texts(draw(page("standard", dim=20)))


def test_travels_from_standard_to_shuffled_by_hand() -> None:
    """K vectors move whole and become neighbours; eight V vectors exchange elements with eight."""
    moves = travels(page("standard"), page("shuffled"))
    key, value = moves[:8], moves[8:]
    # Token n's last K vector is vector 8n + 3; elements 24 to 31 are the fourth group of sixteen.
    assert [move.source for move in key] == [8 * n + 3 for n in range(8)]
    assert [move.destinations for move in key] == [(48 + n,) for n in range(8)]
    assert {move.head for move in key} == {0}
    # Head 1's V, elements 24 to 31: V starts at vector 128, head 1 after 64 more.
    assert [move.source for move in value] == [128 + 8 * n + 7 for n in range(8)]
    assert {move.destinations for move in value} == {tuple(range(128 + 64 + 24, 128 + 64 + 32))}
    assert {move.head for move in value} == {1}


@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(KINDS, 2)))
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fnuz", "float32"])
def test_sixteen_vectors_travel_and_no_element_is_lost(src: str, dst: str, dtype: str) -> None:
    one, other = page(src, dtype), page(dst, dtype)
    moves = travels(one, other)
    assert len({move.source for move in moves}) == 16
    placed = one.offsets().flatten() // 16
    lands = other.offsets().flatten() // 16
    for move in moves:
        assert {*move.destinations} == {*lands[placed == move.source].tolist()}
    svg = draw(one, other)
    lines = [path for path in elements(svg, "path") if path.get("fill") == "none"]
    assert len(lines) == sum(len(move.destinations) for move in moves)


@pytest.mark.parametrize("kind", KINDS)
def test_every_vector_is_drawn_once(kind: str) -> None:
    svg = draw(page(kind))
    cells = [rect for rect in elements(svg, "rect") if rect.get("rx") == "3"]
    assert len({(rect.get("x"), rect.get("y")) for rect in cells}) == len(cells) == 256
    said = texts(svg)
    assert sum(bool(re.fullmatch(r"t\d+(-\d+)?", text)) for text in said) == 256
    assert not elements(svg, "path")
    assert {kind, "4096 bytes, 128 to a row", "0x0000", "0x1000", "K head 1", "V head 1"} <= {*said}
    # Two heads, K and V: four colours, and all the same number of cells.
    fills = [rect.get("fill") for rect in cells]
    assert {fills.count(fill) for fill in fills} == {64}


def test_token_order_is_the_text() -> None:
    said = texts(draw(page("shuffled", heads=1)))
    tokens = [text for text in said if re.fullmatch(r"t\d+(-\d+)?", text)]
    assert tokens[:16] == [f"t{n}" for n in range(16)]
    assert tokens[64:66] == ["t0-7", "t0-7"]
    assert tokens[127] == "t8-15"


def test_the_drawing_stays_inside_its_frame() -> None:
    for svg in (
        draw(page("standard"), page("shuffled")),
        draw(page("x_packed", heads=7)),
        draw(page("split_nhd", heads=1)),
    ):
        _, _, width, height = (float(v) for v in (ElementTree.fromstring(svg).get("viewBox") or "").split())
        for element in elements(svg, "text"):
            size = float(element.get("font-size") or 0)
            assert float(element.get("x") or 0) + 0.61 * size * len(element.text or "") <= width
            assert float(element.get("y") or 0) <= height - 12


def test_the_command_writes_what_the_readme_shows(tmp_path: Path) -> None:
    out = tmp_path / "page.svg"
    assert main([*README_COMMAND.split(), str(out)]) == 0
    drawn = out.read_text(encoding="utf-8")
    assert drawn == README_IMAGE.read_text(encoding="utf-8"), "draw docs/images/standard-to-shuffled.svg again"


def test_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout"]) == 0
    assert capsys.readouterr().out == draw(page("shuffled"))


def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "--tokens", "12"]) == 1
    assert "need page_size to be a multiple of 8, got 12" in capsys.readouterr().err
    missing = tmp_path / "no" / "page.svg"
    assert main(["layout", "-o", str(missing)]) == 1
    assert f"error: layout: --output must be writable, got [Errno 2] No such file or directory: '{missing}'" in (
        capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main(["layout", "--format", "round"])
    with pytest.raises(InvalidArgumentError, match="at most 4096 vectors of 16 bytes, got 8192"):
        draw(page("standard", heads=16, dim=128))
