# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""A package `aiter` on the import path whose MLA functions are plain torch, with the signatures of several releases.

What real ones leave unwritten is NaN here: the LSE before 0.1.13, results of no keys, the LSE of a single piece.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashinfer.backends.aiter import entry, mla
from flashinfer.core import aiter_install
from flashinfer.core.aiter_install import find_aiter

HEADER = """
import math
import torch
CALLS = []

def attend(name, f):
    CALLS.append((name, dict(f)))
    q, kv, o = f["q"], f["kv_buffer"], f["o"]
    assert kv.dim() == 4 and kv.shape[1:] == (1, 1, 576) and q.is_contiguous() and o.is_contiguous()
    assert q.shape[1] in (16, 128) and q.dtype == kv.dtype == o.dtype == torch.bfloat16
    assert all(f[n].dtype == torch.int32 for n in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens"))
    assert (f["kv_last_page_lens"] == 1).all()
    o.fill_(math.nan)
    lse = torch.full(q.shape[:2], math.nan)
    qo, at = f["qo_indptr"].tolist(), f["kv_indptr"].tolist()
    for b in range(len(qo) - 1):
        keys = kv[f["kv_indices"][at[b]:at[b + 1]].long(), 0, 0].double()
        n, total = qo[b + 1] - qo[b], at[b + 1] - at[b]
        assert n <= f["max_seqlen_q"]
        if name == "decode":
            assert n == f["max_seqlen_q"]
        for i in range(n if total else 0):
            seen = keys[:total - n + i + 1]
            scores = q[qo[b] + i].double() @ seen.T * f["sm_scale"]
            o[qo[b] + i] = (scores.softmax(-1) @ seen[:, :512]).to(o.dtype)
            lse[qo[b] + i] = scores.logsumexp(-1).float()
    return lse

def mla_prefill_fwd(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale=None,
                    logit_cap=0.0, num_kv_splits=None):
    return o, attend("prefill", locals())
"""
FIRST = "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, "
OLDER = FIRST + "sm_scale=None, logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None, work_meta_data=None"
PAGED = FIRST + (
    "page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None, "
    "work_meta_data=None, return_logits=False, return_lse=False"
)
WITHOUT_LSE = "    return None, attend('decode', locals()).fill_(math.nan)\n"
WITH_LSE = """
    HAS_FINAL_LSE = return_lse
    lse = attend("decode", locals())
    return None, (lse if num_kv_splits > 1 else lse.fill_(math.nan)) if HAS_FINAL_LSE else None
"""
# Version to the parameters of its decode and what follows them.
RELEASES = {
    "0.1.7.post2.dev18": (OLDER, WITHOUT_LSE),
    "0.1.7.post5": (OLDER, WITHOUT_LSE),
    "0.1.10": (OLDER + ", return_lse=False", WITHOUT_LSE),
    "0.1.12.post2": (PAGED, WITHOUT_LSE),
    "0.1.13": (PAGED, WITH_LSE),
    "0.1.20+rocm7": (PAGED + ", causal=True", WITH_LSE),
}


def install(folder: Path, version: str, release: str = "", init: str = "") -> None:
    """Put the stand-in of a release into a folder; it may call itself another version."""
    parameters, body = RELEASES[release or version]
    package, info = folder / "aiter", folder / "amd_aiter-0.dist-info"
    for path in (package, info):
        path.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "mla.py").write_text(f"{HEADER}\ndef mla_decode_fwd({parameters}):\n{body}")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {version}\n")


@contextlib.contextmanager
def found(folder: Path) -> Iterator[None]:
    """The process as if it had just started on an MI300X, and AITER were in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name in ("aiter", "aiter.mla"):
            patch.delitem(sys.modules, name, raising=False)
        patch.setattr(entry, "_functions", {})
        patch.setattr(entry, "_failures", {})
        patch.setattr(aiter_install, "why_not_gpu", lambda device: None)
        patch.setattr(mla, "_has_warned", False)
        find_aiter.cache_clear()
        try:
            yield
        finally:
            for name in ("aiter", "aiter.mla"):
                sys.modules.pop(name, None)
    find_aiter.cache_clear()


def calls() -> list[tuple[str, dict[str, Any]]]:
    """Which functions were called, with all their arguments."""
    recorded: list[tuple[str, dict[str, Any]]] = sys.modules["aiter.mla"].CALLS
    return recorded
