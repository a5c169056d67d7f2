"""Repairs of Triton's CPU interpreter, for tests only; :func:`repair` before the first launch.

Up to 3.9 the interpreter holds bfloat16 as its 16 bits: ``tl.dot`` multiplies the bits, and the cast from float32 cuts
them off instead of rounding. Kernels do all other arithmetic in float32, so these two are all that has to be put right.
Up to 3.6 a loop bound that was loaded from memory fails with numpy 2.4, where int() refuses an array of one element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def bf16_to_fp32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fp32_to_bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def repair() -> None:
    builder = interpreter.InterpreterBuilder
    plain_cast, plain_fp_to_fp, plain_dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def cast(source: Any, target: Any) -> Any:
        pair = (source.dtype.scalar, target.scalar)
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(bf16_to_fp32(source.data), tl.float32)
        if pair == (tl.float32, tl.bfloat16):
            return interpreter.TensorHandle(fp32_to_bf16(source.data), tl.bfloat16)
        return None

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        handle = cast(src, dst_type)
        return plain_cast(self, src, dst_type) if handle is None else handle

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        handle = cast(src, dst_type)
        return plain_fp_to_fp(self, src, dst_type, rounding_mode) if handle is None else handle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return plain_dot(self, a, b, d, *options)
        return interpreter.TensorHandle(bf16_to_fp32(a.data) @ bf16_to_fp32(b.data) + d.data, d.dtype.scalar)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = cast_impl, create_fp_to_fp, create_dot
    for name in ("create_si_to_fp", "create_ui_to_fp", "create_fp_ext", "create_fp_trunc"):
        setattr(builder, name, cast_impl)

    plain_patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        plain_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_lang_tensor
