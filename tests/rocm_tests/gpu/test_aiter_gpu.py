# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The append through AITER on a GPU: streams, capture and reports, with a stand-in for AITER in both interfaces.

With AITER installed on an AMD GPU, its own kernels are also held against the native ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer.testing.compare import assert_equal_bits
from rocm_tests.backends.aiter_standin import INTERFACES, found, install
from rocm_tests.page.oracle import make_batch, random_on

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
PAUSE_CYCLES = 100_000_000


@pytest.fixture(params=INTERFACES, scope="module")
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = install(request.param, tmp_path_factory.mktemp(request.param))
    with found(folder):
        assert flashinfer.warmup(DEVICE)["page_aiter"] is None
        yield folder
        flashinfer.check_device_errors()


class Append:
    """An append of 40 rows of which `set(step)` writes all inputs, on the current stream."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, N: int = 16, H: int = 4, D: int = 64) -> None:
        self.rows = torch.zeros(2, 40, H, D, dtype=dtype, device=DEVICE)
        self.pool = torch.zeros(4, 2, N, H, D, dtype=dtype, device=DEVICE)
        self.batch = torch.zeros(40, dtype=torch.int32, device=DEVICE)
        self.positions = torch.arange(40, device=DEVICE)
        self.pages, self.indptr = torch.zeros(3, dtype=torch.int32, device=DEVICE), torch.tensor([0, 3], device=DEVICE)

    def set(self, step: int) -> None:
        self.rows.copy_(torch.arange(self.rows.numel(), device=DEVICE).view(self.rows.shape) % 251 + step)
        self.pages.copy_((torch.arange(3, device=DEVICE) + step) % 4)
        self.pool.zero_()

    def run(self, backend: str = "aiter") -> None:
        flashinfer.append_paged_kv_cache(
            *self.rows.unbind(),
            self.batch,
            self.positions,
            self.pool,
            self.pages,
            self.indptr,
            self.batch[:1],
            backend=backend,
        )

    def wanted(self, step: int) -> torch.Tensor:
        self.set(step)
        self.run("reference")
        torch.cuda.synchronize()
        return self.pool.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("N", "H", "D"), [(16, 8, 128), (1, 1, 64), (5, 3, 7)])
def test_rows_go_where_the_native_kernel_puts_them(site: Path, N: int, H: int, D: int, dtype: torch.dtype) -> None:
    batch = make_batch((2 * N + 1, N, 0, 300), (N + 1, 1, 0, 257), N, padding=3, device=DEVICE)
    key, value = (random_on((batch.nnz, H, D), dtype, DEVICE, seed) for seed in (1, 2))
    pool = random_on((batch.num_pages, 2, N, H, D), dtype, DEVICE, 3)
    other = pool.clone()
    table = batch.kv_indices, batch.kv_indptr, batch.last_page_len
    for backend, cache in (("aiter", pool), ("native", other)):
        flashinfer.append_paged_kv_cache(
            key, value, batch.batch_indices, batch.positions, cache, *table, backend=backend
        )
    assert_equal_bits(pool, other)


def test_a_side_stream_is_followed(site: Path) -> None:
    """Inputs are written late on the side stream: a call that loses the stream reads the old ones."""
    append = Append()
    want = append.wanted(3)
    append.set(1)
    append.run()
    torch.cuda.synchronize()
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(PAUSE_CYCLES)
        append.set(3)
        append.run()
        done.record()
    assert not done.query(), "the call waited for the device"
    torch.cuda.current_stream().wait_event(done)
    assert_equal_bits(append.pool.clone(), want)


def test_the_stream_of_the_call_reaches_aiter(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, stream, log = Append(), torch.cuda.Stream(), tmp_path / "log"
    append.set(1)
    torch.cuda.synchronize()
    monkeypatch.setenv("FLASHINFER_STANDIN_LOG", str(log))
    append.run()
    with torch.cuda.stream(stream):
        append.run()
    append.run()
    streams = [int(line.split("stream=")[1].split()[0]) for line in log.read_text().splitlines()]
    assert streams == [0, stream.cuda_stream, 0]


def test_a_graph_records_it(site: Path) -> None:
    append = Append()
    wanted = {step: append.wanted(step) for step in (2, 5)}
    append.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append.run()
    for step in (2, 5, 2):
        append.set(step)
        graph.replay()
        assert_equal_bits(append.pool.clone(), wanted[step])


def test_bad_metadata_is_skipped_and_reported(site: Path) -> None:
    append = Append()
    want = append.wanted(1)
    append.set(1)
    append.pages[1] = 77
    append.run()
    with pytest.raises(flashinfer.InvalidArgumentError, match=r"kv_indices\[1\] must be a page id in \[0, 4\), got 77"):
        flashinfer.check_device_errors()
    want[2] = 0  # page of the entry that was overwritten
    assert_equal_bits(append.pool, want)


@pytest.mark.aiter
def test_aiter_itself_writes_what_plain_torch_writes() -> None:
    if torch.version.hip is None:
        pytest.skip("needs an AMD GPU")
    append = Append()
    want = append.wanted(4)
    append.set(4)
    append.run()
    assert_equal_bits(append.pool, want)
