"""The operators that the Python side calls in the native library, so that a library built from other sources is refused
when it is loaded, in one sentence, and does not fail in the middle of a step.

csrc/cpu registers exactly these. An operator whose meaning changes under its types (the order of a list of tensors, a
layout in memory) gets another name for an argument: the schema is then a different one.
"""

from __future__ import annotations

import torch

REMEDY = "rebuild it: `python setup.py build_ext --inplace` in a checkout, `pip install .` elsewhere"

SCHEMAS = {
    "cpu_level": "() -> str",
    "cpu_levels": "() -> str",
    "set_cpu_level": "(str name) -> ()",
    "linear": "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    "silu_mul": "(Tensor gate_up) -> Tensor",
    "rope_and_cache": "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor positions, Tensor(a!) k_cache, "
    "Tensor(b!) v_cache, Tensor slots) -> Tensor",
    "paged_attention": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_query, Tensor context_lens, "
    "Tensor block_tables, Tensor share_group, Tensor shared_blocks, float scale) -> Tensor",
    "sample_tokens": "(Tensor logits, Tensor uniform, Tensor temperature) -> (Tensor, Tensor)",
    "keyed_uniforms": "(Tensor seed, Tensor prompt_id, Tensor sample_index, Tensor position) -> Tensor",
    "decoder_create": "(Tensor[] weights, Tensor[] caches, int num_heads, float eps) -> int",
    "decoder_free": "(int handle) -> ()",
    "decoder_forward": "(int handle, Tensor token_ids, Tensor cos, Tensor sin, Tensor cu_query, Tensor context_lens, "
    "Tensor block_tables, Tensor share_group, Tensor shared_blocks, Tensor logits_rows) -> Tensor",
    "decoder_sample": "(int handle, Tensor hidden, Tensor index, Tensor uniform, Tensor temperature) -> "
    "(Tensor, Tensor, float)",
    "decoder_bind": "(int handle, Tensor[] rows, Tensor cos, Tensor sin) -> ()",
    "decoder_steps": "(int handle, Tensor slots, int most_steps, int stop_at_rows) -> (Tensor, Tensor, Tensor)",
    "rotary_split": "(Tensor qkv, Tensor cos, Tensor sin, int num_heads, int num_kv_heads) -> (Tensor, Tensor, Tensor)",
    "rotary_merge": "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin) -> Tensor",
    "rms_norm_backward": "(Tensor grad_y, Tensor x, Tensor weight, float eps, Tensor? grad_sum) -> (Tensor, Tensor)",
    "silu_mul_backward": "(Tensor grad_y, Tensor gate_up) -> Tensor",
    "varlen_attention": "(Tensor q, Tensor k, Tensor v, Tensor spans, Tensor groups, float scale) -> "
    "(Tensor out, Tensor lse)",
    "varlen_attention_backward": "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor spans, Tensor groups, float scale) -> (Tensor, Tensor, Tensor)",
    "logits_stats": "(Tensor logits, Tensor targets, float temperature) -> (Tensor, Tensor, Tensor)",
    "logits_grad_": "(Tensor(a!) logits, Tensor targets, Tensor lse, Tensor entropy, Tensor grad_logprob, "
    "Tensor grad_entropy, float temperature, int first_column) -> ()",
}


class StaleLibraryError(ImportError):
    """The library loads and was built from sources of another version."""


def check_interface() -> None:
    """Raise StaleLibraryError unless the loaded library has every operator of :data:`SCHEMAS`, as it stands there."""
    for name, schema in SCHEMAS.items():
        found = _schema(name)
        if found != schema:
            has = f"lacks the operator {name}" if found is None else f"has the operator {name} as {found}"
            raise StaleLibraryError(
                f"sagc_fast._C was built from other sources than this version's: it {has} and {schema} is needed"
            )


def _schema(name: str) -> str | None:
    packet = getattr(torch.ops.sagc_fast, name, None)
    return None if packet is None else str(packet.default._schema).removeprefix(f"sagc_fast::{name}")
