# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, with the tokenizer in the GGUF file."""

from __future__ import annotations

from pathlib import Path

# What an incomplete UTF-8 sequence decodes to.
_REPLACEMENT = "�"


class ChatTokenizer:
    """The model's tokenizer and chat template."""

    def __init__(self, gguf: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)

    def encode(self, prompt: str) -> list[int]:
        """The prompt as the user's turn of a chat, ready for the assistant's."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False).input_ids]

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, without special ones."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


class TextStream:
    """Text of a growing list of tokens, piece by piece.

    A character may take several tokens, so a piece is held back while it ends in an incomplete one.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._shown = ""

    def push(self, token_id: int) -> str:
        """What this token adds."""
        self._token_ids.append(token_id)
        text = self._tokenizer.decode(self._token_ids)
        if text.endswith(_REPLACEMENT):
            return ""
        piece, self._shown = text[len(self._shown) :], text
        return piece

    def flush(self) -> str:
        """What is held back, once no token follows: the text ends in an incomplete character."""
        text = self._tokenizer.decode(self._token_ids)
        piece, self._shown = text[len(self._shown) :], text
        return piece
