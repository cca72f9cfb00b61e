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
    assert "append_paged_kv_cache          native > reference" in lines


def test_without_arguments_the_signature_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "get_seq_lens"]) == 0
    assert "Tensor kv_indptr, Tensor kv_last_page_len, int page_size" in capsys.readouterr().out


def test_a_call_is_answered_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "get_seq_lens", *SEQ_LENS]) == 0
    assert capsys.readouterr().out.splitlines() == ["native       takes the call", "reference    takes the call"]


def test_a_list_of_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    words = "planes=bfloat16[8,256]*4 planes_per_layer=2 block_ids=int64[2] src=standard dst=shuffled num_kv_heads=1"
    assert main(["explain", "convert_kv_pages", *words.split(), "page_size=16", "head_dim=16"]) == 0
    assert "native       takes the call" in capsys.readouterr().out


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
        (["get_seq_lens", "kv_indptr=int32[9]", *SEQ_LENS[1:]], "kv_indptr must be of length 4"),
    ],
)
def test_what_makes_no_call_is_refused(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 1
    assert sentence in capsys.readouterr().err
