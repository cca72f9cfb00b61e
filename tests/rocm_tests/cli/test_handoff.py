# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""The hand-off as a user runs it: two processes, a NIXL read between them, the verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashinfer.cli.handoff_job.report import Comparison
from flashinfer.cli.handoff_job.tokenizer import TextStream

ROOT = Path(__file__).resolve().parents[3]
PROMPT = "Name the days of the week."
NEW_TOKENS = 8
RESIDENT_LIMIT = 2e9


def handoff(*arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one run."""
    done = subprocess.run(
        [sys.executable, "-m", "flashinfer", "handoff", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    return done.returncode, done.stdout, done.stderr


def handoff_json(*arguments: str) -> tuple[int, dict[str, Any]]:
    status, printed, errors = handoff("--json", "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS), *arguments)
    assert printed, errors
    # json.loads takes one value only, so this also says that nothing else was printed.
    report = json.loads(printed)
    assert isinstance(report, dict)
    return status, report


def check_transfer(report: dict[str, Any], page_size: int, element_size: int) -> None:
    """The whole prompt, half page by half page, into blocks of other numbers."""
    layers, kv_heads, head_dim = 30, 3, 64
    pages = -(-report["prompt_tokens"] // page_size)
    assert report["prompt_tokens"] % page_size, "the last page is meant to be partly filled"
    assert report["pages"] == pages
    assert report["descriptors"] == 2 * layers * pages
    assert report["bytes_moved"] == layers * pages * kv_heads * page_size * 2 * head_dim * element_size
    assert len(set(report["prefill_block_ids"])) == len(set(report["decode_block_ids"])) == pages
    assert report["prefill_block_ids"] != report["decode_block_ids"]
    assert set(report["peak_resident_bytes"]) >= {"prefill", "decode", "parent"}
    assert max(report["peak_resident_bytes"].values()) < RESIDENT_LIMIT


@pytest.mark.nixl
@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "dtype", "element_size"), [(16, "float32", 4), (32, "bfloat16", 2)], ids=str)
def test_tokens_equal_both_references(page_size: int, dtype: str, element_size: int) -> None:
    status, report = handoff_json("--page-size", str(page_size), "--dtype", dtype)
    assert report["verdict"] == "identical", report["comparisons"]
    assert status == 0
    check_transfer(report, page_size, element_size)
    assert 1 < len(report["token_ids"]) <= NEW_TOKENS
    assert report["text"].strip()
    references = [comparison["reference"] for comparison in report["comparisons"]]
    assert any("one process" in reference for reference in references)
    assert any("transformers" in reference for reference in references)


@pytest.mark.nixl
@pytest.mark.slow
def test_without_conversion_the_text_is_another_and_the_status_says_so() -> None:
    status, report = handoff_json("--no-convert")
    assert status == 1
    assert report["verdict"] == "not identical"
    check_transfer(report, 16, 4)
    against_one_process = report["comparisons"][0]
    # The first token is the prefill's; everything after it comes from misread pages.
    assert 1 <= against_one_process["common_tokens"] < len(against_one_process["expected_token_ids"])
    assert "standard" in report["refusal"]
    assert "shuffled" in report["refusal"]


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--page-size", "6"), "page_size to be a multiple of 4"),
        (("--page-size", "0"), "page_size must be a positive integer"),
        (("--max-new-tokens", "0"), "--max-new-tokens must be at least 1"),
        (("--max-new-tokens", "9000"), "at most 8192 tokens"),
        (("--prompt", "word " * 9000), "prompt and new tokens must be at most 8192 tokens, got 9"),
        (("--prompt-file", "no such file"), "--prompt-file must be a readable UTF-8 file"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_bad_options_are_named(arguments: tuple[str, ...], message: str) -> None:
    status, printed, errors = handoff(*arguments)
    assert status != 0
    assert not printed
    assert message in errors
    assert "Traceback" not in errors
    assert "loading the model" not in errors, "refused before a child is started"


def test_comparison_counts_the_leading_tokens_that_agree() -> None:
    assert Comparison("a", "b", [1, 2, 3], [1, 2, 3]).identical
    shorter = Comparison("a", "b", [1, 2, 3], [1, 2])
    assert not shorter.identical
    assert shorter.common == 2
    other = Comparison("a", "b", [1, 2, 3], [1, 4, 3])
    assert other.common == 1
    assert "the first 1 of 3 tokens agree" in other.line()


class HexTokenizer:
    """A token is a byte."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


def test_a_text_that_ends_within_a_character_is_shown_whole() -> None:
    stream = TextStream(HexTokenizer())  # type: ignore[arg-type]
    assert [stream.push(byte) for byte in "aé".encode()] == ["a", "", "é"]
    assert stream.flush() == ""
    assert stream.push("é".encode()[0]) == ""
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.flush() == ""
