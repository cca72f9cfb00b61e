# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Requests to servers that speak OpenAI's protocol, with nothing but the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from flashinfer.core.errors import FlashInferError

_TIMEOUT_S = 600.0


class RequestError(FlashInferError, RuntimeError):
    """A server refused a request, or is not there."""


def post(url: str, body: dict[str, Any]) -> Any:
    """Post JSON; the open response."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        raise RequestError(f"{url} answered {error.code}: {text[:1000]}") from error
    except OSError as error:
        raise RequestError(f"{url} does not answer: {error}") from error


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post JSON; the JSON that comes back."""
    with post(url, body) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def stream(url: str, body: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """A completion as it comes: pieces of text, each with its tokens."""
    with post(url, {**body, "stream": True, "return_token_ids": True}) as response:
        for line in response:
            data = line.decode("utf-8").strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RequestError(f"{url} broke off: {event['error']}")
            for choice in event["choices"]:
                yield choice["text"], choice.get("token_ids") or []


def metrics(url: str) -> dict[str, float]:
    """A server's Prometheus samples, summed over labels other than a histogram's."""
    samples: dict[str, float] = {}
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        for line in response.read().decode("utf-8").splitlines():
            if not line.startswith("#") and "le=" not in line:
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                samples[name] = samples.get(name, 0.0) + float(value)
    return samples
