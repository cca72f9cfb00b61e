# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Entry of every child process: `python -m flashinfer.cli.handoff_job.child ROLE GGUF DTYPE`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from flashinfer.cli.handoff_job import decode, prefill, reference
from flashinfer.cli.handoff_job.channel import Channel, peak_resident_bytes
from flashinfer.cli.handoff_job.job import DTYPES, Job
from flashinfer.cli.handoff_job.model import LlamaRunner

_RUNS = {"prefill": prefill.run, "decode": decode.run, "one-process": reference.run_one_process}


def main(role: str, gguf: Path, dtype: torch.dtype) -> None:
    """Load the model, wait for the job, do it."""
    channel = Channel()
    # One core each: several of these processes run at once, and the order of additions must be the same in all.
    torch.set_num_threads(1)
    if role == "transformers":
        # Silent: it loads while the decoder's text is on the screen.
        model = reference.load_transformers(gguf)
        channel.send("loaded")
        reference.run_transformers(model, Job(**channel.receive()), channel)
    else:
        channel.send("status", text="loading the model")
        runner = LlamaRunner(gguf, dtype)
        channel.send("loaded")
        _RUNS[role](runner, Job(**channel.receive()), channel)
    channel.send("done", pid=os.getpid(), peak_resident_bytes=peak_resident_bytes())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), DTYPES[sys.argv[3]])
