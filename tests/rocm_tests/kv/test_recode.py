# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Conversion between the two flavours of 8-bit floats: all 256 codes, against torch's own dtypes (known fault 36)."""

from __future__ import annotations

import pytest
import torch

import flashinfer
from flashinfer.core.dtypes import FNUZ, OCP
from flashinfer.kv import PageFormat, convert_kv_pages, scale_factor

BACKENDS = ["native", "reference"]
NAMES = {OCP: str(OCP).removeprefix("torch."), FNUZ: str(FNUZ).removeprefix("torch.")}
DIRECTIONS = [(OCP, FNUZ), (FNUZ, OCP)]
CODES = torch.arange(256, dtype=torch.uint8)


def recoded(
    src: torch.dtype, dst: torch.dtype, scale_mode: str | None, backend: str, device: str = "cpu"
) -> torch.Tensor:
    """What the 256 codes of `src` become; they fill a page of 1 head, 16 tokens of 8, in both K and V."""
    formats = [PageFormat("split_hnd", NAMES[d], 1, 16, 16, scale_mode) for d in (src, dst)]
    page = CODES.repeat(2).view(1, 512).clone().to(device)
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    convert_kv_pages([page], ids, *formats, allow_inexact=True, backend=backend)
    assert torch.equal(page[0, :256], page[0, 256:])
    return page[0, :256].cpu()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("src", "dst"), DIRECTIONS)
def test_every_code_with_a_scale(src: torch.dtype, dst: torch.dtype, backend: str) -> None:
    """value * scale is unchanged; only the largest FNUZ code, 240, has no OCP code of twice the value."""
    got = recoded(src, dst, "per_tensor", backend).view(dst).float()
    factor = scale_factor(*(PageFormat("split_hnd", NAMES[d], 1, 16, 16, "per_tensor") for d in (src, dst)))
    assert factor == (2.0 if dst == FNUZ else 0.5)
    want = CODES.view(src).float()
    if dst == OCP:
        want = want.clamp(-224, 224)
    torch.testing.assert_close(got * factor, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("src", "dst"), DIRECTIONS)
def test_every_code_by_value(src: torch.dtype, dst: torch.dtype, backend: str) -> None:
    """As torch's own conversion through float32, saturated."""
    got = recoded(src, dst, None, backend).view(dst).float()
    want = CODES.view(src).float().clamp(-torch.finfo(dst).max, torch.finfo(dst).max).to(dst).float()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_negative_zero_becomes_zero_and_not_nan(backend: str) -> None:
    for scale_mode in (None, "per_tensor"):
        assert recoded(OCP, FNUZ, scale_mode, backend)[0x80] == 0
        assert recoded(FNUZ, OCP, scale_mode, backend)[0x80] == 0x7F


def test_what_would_change_values_needs_leave() -> None:
    page, ids = torch.zeros(1, 512, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    ocp, fnuz = (PageFormat("standard", NAMES[d], 1, 16, 16) for d in (OCP, FNUZ))
    for src, dst in ((ocp, fnuz), (fnuz, ocp)):
        with pytest.raises(flashinfer.InvalidArgumentError, match="pass allow_inexact=True"):
            convert_kv_pages([page], ids, src, dst)
    scaled = [PageFormat("standard", NAMES[d], 1, 16, 16, "per_head") for d in (OCP, FNUZ)]
    convert_kv_pages([page], ids, *scaled)  # exact: the scale doubles
    with pytest.raises(flashinfer.InvalidArgumentError, match="pass allow_inexact=True"):
        convert_kv_pages([page], ids, *reversed(scaled))
    with pytest.raises(flashinfer.InvalidArgumentError, match="dst must be of src's scale_mode per_head, got None"):
        convert_kv_pages([page], ids, scaled[0], fnuz)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kind_and_flavour_in_one_call(backend: str) -> None:
    """A page converted in two steps, by kind and by flavour, equals one converted in one."""
    src = PageFormat("standard", NAMES[OCP], 3, 32, 64, "per_tensor")
    middle = PageFormat("shuffled", NAMES[OCP], 3, 32, 64, "per_tensor")
    dst = PageFormat("shuffled", NAMES[FNUZ], 3, 32, 64, "per_tensor")
    pool = torch.randint(0, 256, (4, src.page_bytes), dtype=torch.uint8)
    two, one, ids = pool.clone(), pool.clone(), torch.tensor([2, 0])
    convert_kv_pages([two], ids, src, middle, backend="reference")
    convert_kv_pages([two], ids, middle, dst, backend="reference")
    convert_kv_pages([one], ids, src, dst, backend=backend)
    assert torch.equal(one, two)
    assert torch.equal(one[1::2], pool[1::2])
