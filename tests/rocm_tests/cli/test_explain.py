# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""`python -m flashinfer explain`."""

from __future__ import annotations

import pytest

from flashinfer.cli import main
from flashinfer.core.op import OPS

SEQ_LENS = ["kv_indptr=int32[4]", "kv_last_page_len=int32[3]", "page_size=16", "seq_lens=int32[3]"]


def test_without_an_op_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(OPS)
    assert "append_paged_kv_cache          native > aiter > reference" in lines


def test_without_arguments_the_signature_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "get_seq_lens"]) == 0
    assert "Tensor kv_indptr, Tensor kv_last_page_len, int page_size" in capsys.readouterr().out


def test_a_call_is_answered_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "get_seq_lens", *SEQ_LENS]) == 0
    assert capsys.readouterr().out.splitlines() == ["native       takes the call", "reference    takes the call"]


def test_a_list_of_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    words = "planes=bfloat16[8,256]*4 planes_per_layer=2 block_ids=int64[2] src=standard src_heads=1 src_page_size=16"
    more = "dst=shuffled dst_heads=1 dst_page_size=16 head_dim=16 recode=0"
    assert main(["explain", "convert_kv_pages", *words.split(), *more.split()]) == 0
    assert "native       takes the call" in capsys.readouterr().out


def test_an_optional_tensor_may_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "q_nope=bfloat16[2,4,64] q_pe=bfloat16[2,4,16] ckv_cache=bfloat16[9,4,64] kpe_cache=bfloat16[9,4,16] "
        "qo_indptr=int32[3] kv_indptr=int32[3] kv_indices=int32[5] kv_len_arr=int32[2] causal=true sm_scale=0.1 "
        "ckv_scale=1 kpe_scale=1 needs_lse=true max_q_len=0 uniform_q=false schedule=none rows_per_item=0 workers=0 "
        "scratch=none out=bfloat16[2,4,64] lse=float32[2,4]"
    )
    assert main(["explain", "mla_paged_attention", *words.split()]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "reference    takes the call"


def test_one_backend_may_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "get_seq_lens", *SEQ_LENS, "--backend", "reference"]) == 0
    assert capsys.readouterr().out.splitlines() == ["reference    takes the call"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], "op must be one of"),
        (
            ["get_seq_lens", "page_size=16"],
            "arguments must be exactly kv_indptr, kv_last_page_len, page_size, seq_lens",
        ),
        (["get_seq_lens", "kv_indptr=int33[4]", *SEQ_LENS[1:]], "kv_indptr must be a tensor such as bfloat16"),
        (["get_seq_lens", *SEQ_LENS[:2], "page_size=x", SEQ_LENS[3]], "page_size must be of type int, got 'x'"),
        (["get_seq_lens", *SEQ_LENS, "--device", "foo"], "--device must be cpu or cuda"),
        (["get_seq_lens", *SEQ_LENS, "--device", "meta"], "--device must be cpu or cuda"),
        (["get_seq_lens", *SEQ_LENS, "page_size=8"], "arguments must be given once each, got page_size several times"),
        (["get_seq_lens", "kv_indptr=int32[99999999999999999999]", *SEQ_LENS[1:]], "size that 64 bits can count"),
        (["get_seq_lens", "kv_indptr=int32[4]*3", *SEQ_LENS[1:]], "kv_indptr must be one tensor"),
        (["get_seq_lens", "kv_indptr=int32[9]", *SEQ_LENS[1:]], "kv_indptr must be of length 4"),
    ],
)
def test_what_makes_no_call_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 1
    assert sentence in capsys.readouterr().err


def test_any_device_and_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    """A question about a machine that this one is not."""
    words = ["kv_indptr=int32[1000000000001]", "kv_last_page_len=int32[1000000000000]", "page_size=16"]
    assert main(["explain", "get_seq_lens", *words, "seq_lens=int32[1000000000000]"]) == 0
    assert capsys.readouterr().out.splitlines() == ["native       takes the call", "reference    takes the call"]
    assert main(["explain", "get_seq_lens", *SEQ_LENS, "--device", "cuda:99"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("native       jit: cuda:99 must be a GPU of this machine, on which torch finds ")
    assert second == "reference    takes the call"
