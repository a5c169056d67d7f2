// What every operator needs from torch's stable ABI: checks with one clear sentence, and dtypes.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

#include "kernels.h"

namespace sagc {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Dtype dtype_of(const Tensor& t, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, name, " must be float32 or bfloat16");
  return type == ScalarType::Float ? Dtype::kFloat32 : Dtype::kBFloat16;
}

// That of the KV cache, which may also be float16.
inline Dtype cache_dtype_of(const Tensor& t, const char* name) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half, name,
                  " must be float32, bfloat16 or float16");
  return type == ScalarType::Half ? Dtype::kFloat16 : dtype_of(t, name);
}

inline void check_type(const Tensor& t, ScalarType type, const char* name, const char* type_name) {
  STD_TORCH_CHECK(t.scalar_type() == type, name, " must be ", type_name);
}

inline void check_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

// [T, heads, D] with the heads of a token side by side: a plain tensor, or a slice of a fused projection.
inline void check_heads(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 3 && (t.size(2) <= 1 || t.stride(2) == 1) && (t.size(1) <= 1 || t.stride(1) == t.size(2)), name,
                  " must be [tokens, heads, head width] with contiguous heads");
}

inline Tensor empty(std::initializer_list<int64_t> size, ScalarType type) {
  return torch::stable::empty({size.begin(), size.size()}, type);
}

}  // namespace sagc
