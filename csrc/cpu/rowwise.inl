// RMSNorm, SwiGLU and RoPE with the write into the KV cache: one pass over a row each, statistics and angles in fp32.
#pragma once

namespace {

template <class T>
void rms_norm_range(const RmsNormArgs& a, int64_t begin, int64_t end) {
  const T *x = static_cast<const T*>(a.x), *residual = static_cast<const T*>(a.residual);
  const T* weight = static_cast<const T*>(a.weight);
  T *y = static_cast<T*>(a.y), *new_residual = static_cast<T*>(a.new_residual);
  for (int64_t t = begin; t < end; t++) {
    const T* row = x + t * a.E;
    Vec squares[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
    if (residual != nullptr) {
      for_each_vec(a.E, [&](int64_t i, int n) {
        Vec sum = round_to(row, load_n(residual + t * a.E + i, n) + load_n(row + i, n));
        store_n(new_residual + t * a.E + i, sum, n);
        Vec& s = squares[i / Vec::kWidth % 4];
        s = Vec::fma(sum, sum, s);
      });
      row = new_residual + t * a.E;
    } else {
      for_each_vec(a.E, [&](int64_t i, int n) {
        Vec v = load_n(row + i, n);
        Vec& s = squares[i / Vec::kWidth % 4];
        s = Vec::fma(v, v, s);
      });
    }
    const float mean = ((squares[0] + squares[1]) + (squares[2] + squares[3])).sum() / static_cast<float>(a.E);
    const Vec inverse = Vec::splat(1.0f / __builtin_sqrtf(mean + a.eps));
    for_each_vec(a.E, [&](int64_t i, int n) {
      store_n(y + t * a.E + i, load_n(weight + i, n) * round_to(row, load_n(row + i, n) * inverse), n);
    });
  }
}

void rms_norm(const RmsNormArgs& a, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? rms_norm_range<float>(a, begin, end) : rms_norm_range<bf16_t>(a, begin, end);
}

template <class T>
void silu_mul_range(const SiluMulArgs& a, int64_t begin, int64_t end) {
  const Vec one = Vec::splat(1.0f);
  for (int64_t t = begin; t < end; t++) {
    const T *gate = static_cast<const T*>(a.gate_up) + t * 2 * a.F, *up = gate + a.F;
    T* y = static_cast<T*>(a.y) + t * a.F;
    for_each_vec(a.F, [&](int64_t i, int n) {
      Vec g = load_n(gate + i, n);
      Vec silu = round_to(gate, g / (one + exp(Vec::zero() - g)));
      store_n(y + i, silu * load_n(up + i, n), n);
    });
  }
}

void silu_mul(const SiluMulArgs& a, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? silu_mul_range<float>(a, begin, end) : silu_mul_range<bf16_t>(a, begin, end);
}

// Dimension i turns with dimension i + D / 2 (the half-split convention of Hugging Face's Llama).
template <class T, class Out>
inline void rotate(const T* x, const float* cos, const float* sin, Out* out, int64_t half) {
  for_each_vec(half, [&](int64_t i, int n) {
    Vec a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
    store_n(out + i, a * c - b * s, n);
    store_n(out + half + i, b * c + a * s, n);
  });
}

template <class T, class C>
void rope_range(const RopeArgs& a, int64_t begin, int64_t end) {
  const int64_t D = a.head_dim, half = D / 2;
  for (int64_t t = begin; t < end; t++) {
    const T* q = static_cast<const T*>(a.q) + t * a.q_stride;
    const T* k = static_cast<const T*>(a.k) + t * a.k_stride;
    const T* v = static_cast<const T*>(a.v) + t * a.v_stride;
    const float *cos = a.cos + a.positions[t] * half, *sin = a.sin + a.positions[t] * half;
    T* q_out = static_cast<T*>(a.q_out) + t * a.num_heads * D;
    for (int64_t h = 0; h < a.num_heads; h++) rotate(q + h * D, cos, sin, q_out + h * D, half);
    const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
    for (int64_t h = 0; h < a.num_kv_heads; h++) {
      const int64_t at = ((block * a.num_kv_heads + h) * a.block_size + offset) * D;
      C* v_out = static_cast<C*>(a.v_cache) + at;
      rotate(k + h * D, cos, sin, static_cast<C*>(a.k_cache) + at, half);
      for_each_vec(D, [&](int64_t i, int n) { store_n(v_out + i, load_n(v + h * D + i, n), n); });
    }
  }
}

template <class T>
void rope_from(const RopeArgs& a, int64_t begin, int64_t end) {
  switch (a.cache_dtype) {
    case Dtype::kFloat32: return rope_range<T, float>(a, begin, end);
    case Dtype::kBFloat16: return rope_range<T, bf16_t>(a, begin, end);
    case Dtype::kFloat16: return rope_range<T, fp16_t>(a, begin, end);
  }
}

void rope_and_cache(const RopeArgs& a, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? rope_from<float>(a, begin, end) : rope_from<bf16_t>(a, begin, end);
}

}  // namespace
