# SPDX-FileCopyrightText: 2026 The flashinfer-rocm authors
# SPDX-License-Identifier: Apache-2.0
"""Attention of an MLA prefill with context, public as `flashinfer.mla_context.MlaContextAttention`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from flashinfer.core.checks import apart, describe, fail, number, writable
from flashinfer.core.dtypes import FP8
from flashinfer.core.errors import BackendUnavailableError, NotPlannedError
from flashinfer.core.mla_project import widened, widened_weight
from flashinfer.core.mla_shape import MlaShape, cache_rows, why_not_rows
from flashinfer.core.op import STEP
from flashinfer.mla_context_planner import MlaContextPlan, MlaContextPlanner, MlaContextStep
from flashinfer.ops import attention as attention_ops
from flashinfer.ops import concat_mla as concat_ops
from flashinfer.ops import merge as merge_ops
from flashinfer.ops import mla_context as ops

ATTENTION = "MlaContextAttention"
FUSED_BACKENDS = ("aiter", "triton")
WAYS = ("auto", "fused", "unfused")
# Results of the workspace begin on such a boundary, so that rows can be moved 16 bytes at a time.
ALIGNMENT = 256


# Of kv_cache, kv_b_proj_weight, kv_scale and weight_scale: what must be the same in every layer.
_LAYER = ("kv_cache", "kv_b_proj_weight", "kv_scale", "weight_scale")
_Layer = tuple[torch.dtype, torch.Size, torch.device] | None


@dataclass(frozen=True)
class _Planned:
    """A step's chunks, and what was decided for it."""

    plan: MlaContextPlan
    fused: bool
    q_data_type: torch.dtype
    model_dtype: torch.dtype
    layer: tuple[_Layer, ...]


class MlaContextAttention:
    """Prefill attention of MLA: new tokens causally, then each chunk of the cached context, merged by log-sum-exp.

    A chunk's latents are multiplied up to keys and values in a workspace, in one launch where a fused kernel takes the
    step, else by a gather, a matrix product and a concatenation. Which, `plan` decides once a step, and `explain` says
    why.

    Parameters
    ----------
    workspace
        Memory for keys and values of a chunk, on the device of the queries. Used during `run` only: layers share it.
    shape
        Of the layers.
    page_size
        Tokens of a page of the cache.
    sm_scale
        Of the scores; `qk_head_dim ** -0.5` by default.
    way
        "auto"; "fused" or "unfused", to refuse the other.
    dcp_world_size
        As of `MlaContextPlanner`.
    attention_backend
        Backend of the attention over each part.

    Notes
    -----
    `plan` and `run` may be called from one thread at a time.
    """

    def __init__(
        self,
        workspace: torch.Tensor,
        shape: MlaShape,
        page_size: int,
        *,
        sm_scale: float | None = None,
        way: str = "auto",
        dcp_world_size: int = 1,
        attention_backend: str = "auto",
    ) -> None:
        if way not in WAYS:
            fail(ATTENTION, "way", f"one of {WAYS}", repr(way))
        if not isinstance(workspace, torch.Tensor) or not workspace.is_contiguous() or workspace.data_ptr() % 16:
            fail(ATTENTION, "workspace", "a tensor, contiguous and on a multiple of 16 bytes", describe(workspace))
        if not isinstance(shape, MlaShape):
            fail(ATTENTION, "shape", "an MlaShape", type(shape).__name__)
        known = ("auto", *attention_ops.ragged_attention.backends)
        if attention_backend not in known:
            fail(ATTENTION, "attention_backend", f"one of {known}", repr(attention_backend))
        scale = shape.qk_head_dim**-0.5 if sm_scale is None else sm_scale
        number(ATTENTION, "sm_scale", scale)
        self._workspace = workspace.view(-1).view(torch.uint8)
        self._shape, self._way, self._attention_backend = shape, way, attention_backend
        self._sm_scale, self._page_size = float(scale), page_size
        # Made once to refuse early what no step could do.
        self._planner = functools.partial(
            MlaContextPlanner, page_size=page_size, device=workspace.device, dcp_world_size=dcp_world_size
        )
        self._planner(0)
        self._planned: _Planned | None = None

    def chunk_tokens(self, dtype: torch.dtype, *, fused: bool) -> int:
        """Context tokens that the workspace holds at once.

        Parameters
        ----------
        dtype
            Of the keys and values.
        fused
            Which of the two ways.
        """
        room = self._workspace.numel() - 3 * ALIGNMENT
        return max(0, room // self._shape.bytes_per_token(dtype, fused=fused))

    def explain(
        self,
        kv_cache: torch.Tensor,
        kv_b_proj_weight: torch.Tensor,
        model_dtype: torch.dtype,
        q_data_type: torch.dtype,
        *,
        kv_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> dict[str, str | None]:
        """Say which way a step would go, and why not the others.

        Parameters
        ----------
        kv_cache, kv_b_proj_weight, kv_scale, weight_scale
            Of any layer, as in `gather_kv_b_proj`.
        model_dtype
            Of the queries, keys and values that `run` will be given.
        q_data_type
            That attention will run in, to which they will be cast.

        Returns
        -------
        dict
            "fused" and "unfused", in order of preference, to None or a sentence.

        Raises
        ------
        InvalidArgumentError
            For a layer that is not of the shape, and for what `gather_kv_b_proj` would refuse.
        """
        for name, dtype in (("model_dtype", model_dtype), ("q_data_type", q_data_type)):
            if not isinstance(dtype, torch.dtype):
                fail(ATTENTION, name, "a torch.dtype", repr(dtype))
        arguments = kv_cache, kv_b_proj_weight, kv_scale, weight_scale
        self._check_layer(*arguments, model_dtype)
        answers = {
            "fused": self._why_not_fused(*arguments, model_dtype, q_data_type),
            "unfused": self._why_not_unfused(*arguments, model_dtype, q_data_type),
        }
        for way in WAYS[1:]:
            if self._way not in ("auto", way):
                answers[way] = f"this {ATTENTION} was made with way={self._way!r}"
        return answers

    def _gather_arguments(
        self,
        kv_cache: torch.Tensor,
        weight: torch.Tensor,
        kv_scale: torch.Tensor | None,
        weight_scale: torch.Tensor | None,
        model_dtype: torch.dtype,
    ) -> tuple[torch.Tensor | None, ...]:
        """Of a call for one token."""
        shape, device = self._shape, self._workspace.device
        index = torch.empty(1, dtype=torch.int32, device=device)
        k, v = (
            torch.empty(1, shape.num_heads, dim, dtype=model_dtype, device=device)
            for dim in (shape.qk_head_dim, shape.v_head_dim)
        )
        return kv_cache, kv_scale, index, index, index, weight, weight_scale, k, v

    def _check_layer(
        self,
        kv_cache: torch.Tensor,
        weight: torch.Tensor,
        kv_scale: torch.Tensor | None,
        weight_scale: torch.Tensor | None,
        model_dtype: torch.dtype,
    ) -> None:
        """Refuse what no way could take; sizes first, in the words of the layer's shape."""
        shape = self._shape
        rows = shape.num_heads * (shape.qk_nope_head_dim + shape.v_head_dim)
        width = shape.kv_lora_rank + shape.qk_rope_head_dim
        if not isinstance(kv_cache, torch.Tensor) or kv_cache.shape[1:] != (self._page_size, width):
            fail(ATTENTION, "kv_cache", f"[pages, {self._page_size}, {width}]", describe(kv_cache))
        if not isinstance(weight, torch.Tensor) or weight.shape != (rows, shape.kv_lora_rank):
            fail(ATTENTION, "kv_b_proj_weight", f"[{rows}, {shape.kv_lora_rank}]", describe(weight))
        ops.gather_kv_b_proj.check_call(self._gather_arguments(kv_cache, weight, kv_scale, weight_scale, model_dtype))

    def _why_not(self, kv_cache: torch.Tensor, q_data_type: torch.dtype) -> str | None:
        """What both ways need."""
        if q_data_type not in attention_ops.QUERY_DTYPES:
            return f"needs attention in 16 bits or more, as no backend takes queries of {q_data_type}"
        return why_not_rows(kv_cache)

    def _why_not_fused(
        self,
        kv_cache: torch.Tensor,
        weight: torch.Tensor,
        kv_scale: torch.Tensor | None,
        weight_scale: torch.Tensor | None,
        model_dtype: torch.dtype,
        q_data_type: torch.dtype,
    ) -> str | None:
        # Not the dtype of the queries at hand: they are cast later, and keys and values come as they are written.
        if q_data_type != model_dtype:
            return (
                f"needs attention in {model_dtype}, in which keys and values are written, got q_data_type {q_data_type}"
            )
        if reason := self._why_not(kv_cache, q_data_type):
            return reason
        arguments = self._gather_arguments(cache_rows(kv_cache), weight, kv_scale, weight_scale, model_dtype)
        reasons = {name: ops.gather_kv_b_proj.functions(name)[0](*arguments) for name in FUSED_BACKENDS}
        if None in reasons.values():
            return None
        return "; ".join(f"{name} {reason}" for name, reason in reasons.items())

    def _why_not_unfused(
        self,
        kv_cache: torch.Tensor,
        weight: torch.Tensor,
        kv_scale: torch.Tensor | None,
        weight_scale: torch.Tensor | None,
        model_dtype: torch.dtype,
        q_data_type: torch.dtype,
    ) -> str | None:
        if reason := self._why_not(kv_cache, q_data_type):
            return reason
        for name, t, scale in (("kv_cache", kv_cache, kv_scale), ("kv_b_proj_weight", weight, weight_scale)):
            if t.dtype != model_dtype and (t.dtype not in FP8 or scale is None):
                return f"needs {name} in {model_dtype}, or in FP8 with a scale, got {t.dtype}"
        if model_dtype not in concat_ops.DTYPES:
            return f"needs keys in 16 bits, which {concat_ops.OP} takes, got {model_dtype}"
        shape, multiple = self._shape, concat_ops.MULTIPLE
        for name, dim in (("qk_nope_head_dim", shape.qk_nope_head_dim), ("qk_rope_head_dim", shape.qk_rope_head_dim)):
            if dim % multiple or not dim:
                return f"needs a {name} that is a multiple of {multiple}, got {dim}"
        return None

    def plan(
        self,
        qo_indptr: torch.Tensor | list[int],
        context_lens: torch.Tensor | list[int],
        block_tables: torch.Tensor,
        kv_cache: torch.Tensor,
        kv_b_proj_weight: torch.Tensor,
        model_dtype: torch.dtype,
        q_data_type: torch.dtype | None = None,
        *,
        kv_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> MlaContextPlan:
        """Take a step: decide its way, and cut its contexts to what the workspace holds.

        Parameters
        ----------
        qo_indptr, context_lens, block_tables
            As of `MlaContextPlanner.plan`.
        kv_cache, kv_b_proj_weight, model_dtype, kv_scale, weight_scale
            As of `explain`; those of other layers are alike.
        q_data_type
            As of `explain`; `model_dtype` by default.

        Returns
        -------
        MlaContextPlan
            The step's chunks.

        Raises
        ------
        InvalidArgumentError
            As `MlaContextPlanner.plan`, and for a layer that `gather_kv_b_proj` would refuse.
        BackendUnavailableError
            If neither way takes the step, with the reasons of both.
        """
        q_data_type = model_dtype if q_data_type is None else q_data_type
        answers = self.explain(
            kv_cache, kv_b_proj_weight, model_dtype, q_data_type, kv_scale=kv_scale, weight_scale=weight_scale
        )
        way = next((name for name, reason in answers.items() if reason is None), None)
        if way is None:
            lines = "\n".join(f"  {name}: {reason}" for name, reason in answers.items())
            raise BackendUnavailableError(f"{ATTENTION}: no way takes this step\n{lines}")
        fused = way == "fused"
        planner = self._planner(self.chunk_tokens(model_dtype, fused=fused))
        plan = planner.plan(qo_indptr, context_lens, block_tables, kv_cache.size(0))
        layer = kv_cache, kv_b_proj_weight, kv_scale, weight_scale
        self._planned = _Planned(plan, fused, q_data_type, model_dtype, tuple(map(_look, layer)))
        return plan

    @property
    def fused(self) -> bool:
        """Whether the present step goes the fused way.

        Raises
        ------
        NotPlannedError
            If there is no step.
        """
        return self._step().fused

    def _step(self) -> _Planned:
        if self._planned is None:
            raise NotPlannedError(f"{ATTENTION}: plan() must be called first")
        return self._planned

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        kv_b_proj_weight: torch.Tensor,
        *,
        kv_scale: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend from a layer's new tokens to themselves and to the context; waits for nothing.

        Nothing is recorded for autograd.

        Parameters
        ----------
        q, k
            `[tokens, num_heads, qk_head_dim]`, queries and keys of the new tokens, the requests one after the other.
        v
            `[tokens, num_heads, v_head_dim]`, their values.
        kv_cache, kv_b_proj_weight, kv_scale, weight_scale
            Of the layer, as in `gather_kv_b_proj`.
        out, lse
            Tensors to write into; allocated if None. `out` must lie outside of `q`, which each chunk reads.

        Returns
        -------
        tuple
            `out [tokens, num_heads, v_head_dim]` of the step's `q_data_type`, and `lse [tokens, num_heads]`, float32 in
            base 2.

        Raises
        ------
        InvalidArgumentError
            For shapes, dtypes or devices that do not fit the step, and for tensors that share memory which is written.
        NotPlannedError
            If there is no step.
        """
        step = self._step()
        self._check_run(step, (q, k, v), (kv_cache, kv_b_proj_weight, kv_scale, weight_scale))
        # The compiler traces no addresses.
        if not torch.compiler.is_compiling():
            self._check_memory(q, out, lse)
        layer = cache_rows(kv_cache), kv_scale, kv_b_proj_weight, weight_scale
        with torch.no_grad():
            return self._run(step, (q, k, v), layer, out, lse)

    def _run(
        self,
        step: _Planned,
        fresh: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        layer: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (t.to(step.q_data_type) for t in fresh)
        shape = self._shape
        if out is None:
            out = q.new_empty(q.size(0), shape.num_heads, shape.v_head_dim)
        if lse is None:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        indptr, longest = step.plan.qo_indptr, step.plan.max_q_len
        self._attend(q, k, v, indptr, indptr, True, (longest, longest), out, lse)
        for part in step.plan.steps:
            chunk = part.chunk
            keys, values = (self._fused if step.fused else self._unfused)(part, step, *layer)
            rows = slice(chunk.q_begin, chunk.q_end)
            partial, partial_lse = torch.empty_like(out[rows]), torch.empty_like(lse[rows])
            lengths = chunk.max_q_len, chunk.max_kv_len
            self._attend(q[rows], keys, values, part.qo_indptr, part.kv_indptr, False, lengths, partial, partial_lse)
            merge_ops.merge_state_in_place(out[rows], lse[rows], partial, partial_lse, None, backend=f"{STEP}auto")
        return out, lse

    def _check_run(
        self, step: _Planned, fresh: tuple[torch.Tensor, ...], layer: tuple[torch.Tensor | None, ...]
    ) -> None:
        """The step's tensors, and a layer like the one that it was planned for."""
        shape = self._shape
        for name, t, dim in zip("qkv", fresh, (shape.qk_head_dim, shape.qk_head_dim, shape.v_head_dim), strict=True):
            want = step.plan.queries, shape.num_heads, dim
            if not isinstance(t, torch.Tensor) or tuple(t.shape) != want or t.dtype != step.model_dtype:
                expected = f"of the step's dtype {step.model_dtype} and of shape {list(want)}"
                fail(ATTENTION, name, expected, describe(t))
        for name, planned, given in zip(_LAYER, step.layer, layer, strict=True):
            if _look(given) != planned:
                like = "None" if planned is None else f"{planned[0]}{list(planned[1])} on {planned[2]}"
                fail(ATTENTION, name, f"{like}, as in the plan", describe(given))
        kv_cache = layer[0]
        if kv_cache is not None and (reason := why_not_rows(kv_cache)):
            raise BackendUnavailableError(f"{ATTENTION}: no way takes this layer: {reason}")

    def _check_memory(self, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        """Refuse what is needed after a chunk was written to the workspace, or a part of the result to `out`."""
        begin = self._workspace.data_ptr()
        for name, t in (("q", q), ("out", out), ("lse", lse)):
            if isinstance(t, torch.Tensor) and begin <= t.data_ptr() < begin + self._workspace.numel():
                fail(ATTENTION, name, "outside of the workspace, which is written while it is needed", describe(t))
        writable(ATTENTION, [(name, t) for name, t in (("out", out), ("lse", lse)) if isinstance(t, torch.Tensor)])
        if isinstance(out, torch.Tensor) and out.dim() == q.dim():
            apart(ATTENTION, "q", q, "out", out)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        causal: bool,
        lengths: tuple[int, int],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        attention_ops.ragged_attention(
            *(q, k, v, qo_indptr, kv_indptr, causal, self._sm_scale, -1, 0.0, 1.0, 1.0, None, None, None, True),
            *lengths,
            *(0, None, out, lse),
            backend=self._attention_backend,
        )

    def _carve(self, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        """Tensors one after the other in the workspace."""
        at, found = 0, []
        for shape in shapes:
            size = math.prod(shape) * dtype.itemsize
            found.append(self._workspace[at : at + size].view(dtype).view(shape))
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return found

    def _fused(
        self,
        part: MlaContextStep,
        step: _Planned,
        rows: torch.Tensor,
        kv_scale: torch.Tensor | None,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape, heads = self._shape, (part.chunk.tokens, self._shape.num_heads)
        k, v = self._carve(step.model_dtype, (*heads, shape.qk_head_dim), (*heads, shape.v_head_dim))
        indices = part.kv_indptr, part.kv_indices, part.kv_indptr
        ops.gather_kv_b_proj(rows, kv_scale, *indices, weight, weight_scale, k, v)
        return k, v

    def _unfused(
        self,
        part: MlaContextStep,
        step: _Planned,
        rows: torch.Tensor,
        kv_scale: torch.Tensor | None,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather, matrix product, concatenation; values stay where the product put them."""
        shape, tokens, dtype = self._shape, part.chunk.tokens, step.model_dtype
        width = shape.qk_nope_head_dim + shape.v_head_dim
        latent, product, k = self._carve(
            dtype,
            (tokens, rows.size(2)),
            (tokens, shape.num_heads * width),
            (tokens, shape.num_heads, shape.qk_head_dim),
        )
        flat = rows.squeeze(1)
        # -1 stands for what was reported; there is no row to skip in a gather of torch's.
        indices = part.kv_indices.clamp_min(0)
        if kv_scale is None:
            torch.index_select(flat, 0, indices, out=latent)
        else:
            latent.copy_(widened(flat[indices], kv_scale, dtype))
        wide = widened_weight(weight, weight_scale, dtype)
        torch.matmul(latent[:, : shape.kv_lora_rank], wide.T, out=product)
        up = product.view(tokens, shape.num_heads, width)
        parts = up[..., : shape.qk_nope_head_dim], latent[:, None, shape.kv_lora_rank :]
        concat_ops.concat_mla_k(k, *parts, backend=f"{STEP}auto")
        return k.to(step.q_data_type), up[..., shape.qk_nope_head_dim :].to(step.q_data_type)


def _look(t: torch.Tensor | None) -> _Layer:
    return (t.dtype, t.shape, t.device) if isinstance(t, torch.Tensor) else None
