# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""NIXL on a machine whose engines share a few cores."""

from __future__ import annotations

import functools
import sys
from typing import Any

# NIXL waits for events in between, so this delays no transfer that they announce.
_PAUSE_US = 1000


@functools.cache
def let_progress_threads_sleep() -> None:
    """Have the progress thread of each NIXL agent that this process makes from now on wait for events.

    NIXL's agent in Python always asks for a pause of 0, with which that thread never sleeps: an idle engine took three
    quarters of a core, and two engines with their peers left none of two cores to anything else. With this it takes
    one hundredth. Nothing can be configured, so the class that the agent makes its own from is exchanged. NIXL itself
    is loaded the way vLLM loads it, which has to come before.
    """
    from vllm.distributed import nixl_utils

    if nixl_utils.NixlWrapper is None:
        return
    bindings: Any = sys.modules[nixl_utils.NixlWrapper.__module__].nixlBind

    class PausingAgent(bindings.nixlAgent):
        def __init__(self, name: str, config: Any) -> None:
            config.pthrDelay = _PAUSE_US
            super().__init__(name, config)

    bindings.nixlAgent = PausingAgent
