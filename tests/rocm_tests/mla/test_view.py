# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`mla_kv_view`: which caches are one buffer. A wrong yes would read other memory, a wrong no would copy the pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashinfer

Pair = tuple[torch.Tensor, torch.Tensor]


def pool(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def halves(t: torch.Tensor, dim: int = 512) -> Pair:
    return t[..., :dim], t[..., dim:]


ADJACENT: dict[str, Callable[[], Pair]] = {
    "slices": lambda: halves(pool(5, 4, 576)),
    "split": lambda: pool(5, 4, 576).split([512, 64], dim=-1),
    "page size 1": lambda: halves(pool(5, 1, 576)),
    "one layer of a buffer": lambda: halves(pool(3, 5, 4, 576)[1]),
    "some pages of a pool": lambda: halves(pool(9, 4, 576)[2:7]),
    "one page": lambda: halves(pool(9, 4, 576)[::9]),
    "fp8": lambda: halves(pool(5, 4, 576, dtype=torch.float8_e4m3fn)),
    "other widths": lambda: halves(pool(5, 4, 80), 64),
    "bytes seen as bf16": lambda: halves(pool(5, 4, 1152, dtype=torch.uint8).view(torch.bfloat16)),
}


def swapped() -> Pair:
    kpe, ckv = halves(pool(5, 4, 576), 64)
    return ckv, kpe


SEPARATE: dict[str, Callable[[], Pair]] = {
    "two allocations": lambda: (pool(5, 4, 512), pool(5, 4, 64)),
    "kpe before ckv": swapped,
    "padded rows": lambda: halves(pool(5, 4, 640)[..., :576]),
    "a gap between the halves": lambda: (pool(5, 4, 640)[..., :512], pool(5, 4, 640)[..., 576:]),
    "a gap in one buffer": lambda: (lambda t: (t[..., :512], t[..., 576:]))(pool(5, 4, 640)),
    "overlapping halves": lambda: (lambda t: (t[..., :512], t[..., 480:544]))(pool(5, 4, 576)),
    "pages with gaps": lambda: halves(pool(10, 4, 576)[::2]),
    "pages of all layers": lambda: halves(pool(5, 3, 4, 576)[:, 1]),
    "unlike pages": lambda: (pool(5, 4, 576)[..., :512], pool(5, 4, 576)[1:, :, 512:]),
    "shifted by a page": lambda: (lambda t: (t[:4, :, :512], t[1:, :, 512:]))(pool(5, 4, 576)),
    "unlike dtypes": lambda: (lambda a, b: (a, b.view(torch.float16)))(*halves(pool(5, 4, 576))),
    "transposed": lambda: halves(pool(4, 5, 576).transpose(0, 1)),
    "tokens last": lambda: (lambda t: (t[:, :512].mT, t[:, 512:].mT))(pool(5, 576, 4)),
    "4-D": lambda: halves(pool(5, 4, 1, 576)),
    "no pages": lambda: halves(pool(0, 4, 576)),
    "unlike devices": lambda: (pool(5, 4, 512), pool(5, 4, 64).to("meta")),
    "planes, not rows": lambda: (lambda t: (t[: 5 * 4 * 512].view(5, 4, 512), t[5 * 4 * 512 :].view(5, 4, 64)))(
        pool(5 * 4 * 576)
    ),
}


@pytest.mark.parametrize("name", ADJACENT)
def test_adjacent_halves_are_one_view(name: str) -> None:
    ckv, kpe = ADJACENT[name]()
    view = flashinfer.mla_kv_view(ckv, kpe)
    assert view is not None
    assert view.data_ptr() == ckv.data_ptr()
    assert view.dtype == ckv.dtype
    assert view.is_contiguous()
    assert torch.equal(view.view(torch.uint8), torch.cat([ckv, kpe], dim=-1).view(torch.uint8))
    view.view(torch.uint8).fill_(1)
    assert int(kpe.contiguous().view(torch.uint8).min()) == 1


@pytest.mark.parametrize("name", SEPARATE)
def test_everything_else_is_not(name: str) -> None:
    assert flashinfer.mla_kv_view(*SEPARATE[name]()) is None


@pytest.mark.parametrize("name", [*ADJACENT, *SEPARATE])
def test_the_fake_answers_alike(name: str) -> None:
    ckv, kpe = (ADJACENT.get(name) or SEPARATE[name])()
    real = flashinfer.mla_kv_view(ckv, kpe)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        # One conversion keeps the storage that two tensors share.
        fake = flashinfer.mla_kv_view(mode.from_tensor(ckv), mode.from_tensor(kpe))
    assert (fake is None) == (real is None)
    if real is not None and fake is not None:
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_what_is_no_tensor_is_named() -> None:
    """Not answered with None, which stands for two buffers."""
    t = pool(5, 4, 576)
    for pair, sentence in (
        ((t, None), "kpe_cache must be a tensor, got NoneType"),
        (([1], t), "ckv_cache must be a tensor, got list"),
        ((t.float().numpy(), t), "ckv_cache must be a tensor, got ndarray"),
    ):
        with pytest.raises(flashinfer.InvalidArgumentError, match=f"^mla_kv_view: {sentence}"):
            flashinfer.mla_kv_view(*pair)


def sum_of_rows(ckv: torch.Tensor, kpe: torch.Tensor) -> torch.Tensor:
    rows = flashinfer.mla_kv_view(ckv, kpe)
    return -ckv.sum() if rows is None else rows.sum()


def test_a_compiled_function_asks_at_every_call() -> None:
    """Pairs that differ in nothing but the buffer, which no guard of a graph looks at."""
    torch._dynamo.reset()
    compiled = torch.compile(sum_of_rows, backend="aot_eager")
    one, other = (torch.ones(5, 4, 576) for _ in range(2))
    ckv, kpe = halves(one)
    for _ in range(2):
        assert compiled(ckv, kpe).item() == 5 * 4 * 576
        assert compiled(ckv, other[..., 512:]).item() == -5 * 4 * 512
    one.zero_()
    assert compiled(ckv, kpe).item() == 0


def test_one_graph_cannot_hold_it() -> None:
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"mla_kv_view: the call must be outside of torch\.compile"):
        torch.compile(sum_of_rows, backend="aot_eager", fullgraph=True)(*halves(torch.ones(5, 4, 576)))
