# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""What a run measured, the verdict, and how both are shown."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The token ids of one run against those of another.

    Parameters
    ----------
    run, reference
        What is compared, for people.
    expected
        Tokens of the reference.
    actual
        Tokens of the run.
    """

    run: str
    reference: str
    expected: Sequence[int]
    actual: Sequence[int]

    @property
    def identical(self) -> bool:
        """Whether all tokens are the same."""
        return list(self.expected) == list(self.actual)

    @property
    def common(self) -> int:
        """Leading tokens that are the same."""
        agree = (a == b for a, b in zip(self.expected, self.actual, strict=False))
        return sum(itertools.takewhile(bool, agree))

    def line(self) -> str:
        """One line for people."""
        if self.identical:
            return f"{self.run} = {self.reference}: identical, {len(self.actual)} tokens"
        agreement = f"the first {self.common} of {len(self.expected)} tokens agree"
        return f"{self.run} = {self.reference}: not identical, {agreement}"


@dataclasses.dataclass(frozen=True)
class Report:
    """One run of the hand-off. Times in seconds, sizes in bytes."""

    dtype: str
    page_size: int
    converted: bool
    refusal: str | None
    prompt_tokens: int
    pages: int
    layers: int
    prefill_block_ids: list[int]
    decode_block_ids: list[int]
    bytes_moved: int
    descriptors: int
    prefill_seconds: float
    transfer_seconds: float
    convert_seconds: float
    decode_seconds: float
    decode_steps: int
    token_ids: list[int]
    text: str
    peak_resident_bytes: dict[str, int]
    comparisons: list[Comparison]

    @property
    def identical(self) -> bool:
        """The verdict."""
        return all(comparison.identical for comparison in self.comparisons)

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        return "identical" if self.identical else "not identical"

    def to_json(self) -> dict[str, object]:
        """JSON-ready form."""
        fields = dataclasses.asdict(self)
        fields["comparisons"] = [
            {
                "run": c.run,
                "reference": c.reference,
                "identical": c.identical,
                "common_tokens": c.common,
                "expected_token_ids": list(c.expected),
                "actual_token_ids": list(c.actual),
            }
            for c in self.comparisons
        ]
        return {"verdict": self.verdict, **fields}

    def table(self) -> str:
        """The measurements, one a line."""
        last = self.prompt_tokens - (self.pages - 1) * self.page_size
        conversion = f"{_milliseconds(self.convert_seconds)}, in place" if self.converted else "none (--no-convert)"
        per_token = self.decode_seconds / max(self.decode_steps, 1)
        rows = [
            ("prompt tokens", str(self.prompt_tokens)),
            ("new tokens", str(len(self.token_ids))),
            ("pages per layer", f"{self.pages} of {self.page_size} tokens, the last one holds {last}"),
            ("blocks, prefill", _ids(self.prefill_block_ids)),
            ("blocks, decode", _ids(self.decode_block_ids)),
            ("bytes moved", f"{self.bytes_moved:,} in {self.descriptors} half pages ({self.layers} layers)"),
            ("prefill", _milliseconds(self.prefill_seconds)),
            ("transfer", _milliseconds(self.transfer_seconds)),
            ("conversion", conversion),
            ("decode, per token", _milliseconds(per_token)),
            *((f"peak memory, {name}", f"{n / 1e9:.2f} GB") for name, n in self.peak_resident_bytes.items()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def conclusion(self) -> str:
        """The comparisons, and the verdict last."""
        lines = [comparison.line() for comparison in self.comparisons]
        if not self.converted:
            lines += [
                "",
                "The decoder read `standard` pages as if they were `shuffled`, because --no-convert asked for it. No",
                "byte was lost and nothing raised an error: the text above is what that misread looks like. Without",
                f"--no-convert the pages are converted; with conversion off negotiation says: {self.refusal}",
            ]
        return "\n".join([*lines, "", f"verdict: {self.verdict}"])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _ids(block_ids: Sequence[int], most: int = 12) -> str:
    shown = " ".join(str(block) for block in block_ids[:most])
    return f"{shown} ..." if len(block_ids) > most else shown
