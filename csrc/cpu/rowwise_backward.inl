// Backward of RMSNorm and SwiGLU, and the rotary embedding of a fused projection in both directions. One pass over a row
// each; statistics, angles and sums in fp32.
#pragma once

namespace {

// With n = x / rms(x) and g = grad_y * weight: grad_x = (g - n mean(g n)) / rms(x), grad_weight = sum over rows of grad_y n.
template <class T>
void rms_norm_backward_range(const RmsNormBackwardArgs& a, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(a.weight);
  const float width = static_cast<float>(a.E);
  for (int64_t item = begin; item < end; item++) {
    float* grad_weight = a.grad_weight + item * a.E;
    for (int64_t i = 0; i < a.E; i++) grad_weight[i] = 0.0f;
    const int64_t last = (item + 1) * kRowsPerSum < a.T ? (item + 1) * kRowsPerSum : a.T;
    for (int64_t t = item * kRowsPerSum; t < last; t++) {
      const T *x = static_cast<const T*>(a.x) + t * a.E, *grad_y = static_cast<const T*>(a.grad_y) + t * a.E;
      const T* grad_sum = a.grad_sum == nullptr ? nullptr : static_cast<const T*>(a.grad_sum) + t * a.E;
      T* grad_x = static_cast<T*>(a.grad_x) + t * a.E;
      Vec squares[2] = {Vec::zero(), Vec::zero()}, dots[2] = {Vec::zero(), Vec::zero()};
      for_each_vec(a.E, [&](int64_t i, int n) {
        const int slot = static_cast<int>(i / Vec::kWidth % 2);
        const Vec v = load_n(x + i, n);
        squares[slot] = Vec::fma(v, v, squares[slot]);
        dots[slot] = Vec::fma(load_n(grad_y + i, n) * load_n(weight + i, n), v, dots[slot]);
      });
      const float inverse = 1.0f / __builtin_sqrtf((squares[0] + squares[1]).sum() / width + a.eps);
      const Vec scale = Vec::splat(inverse);
      const Vec share = Vec::splat((dots[0] + dots[1]).sum() / width * inverse * inverse);
      for_each_vec(a.E, [&](int64_t i, int n) {
        const Vec v = load_n(x + i, n), g = load_n(grad_y + i, n);
        Vec d = (g * load_n(weight + i, n) - v * share) * scale;
        if (grad_sum != nullptr) d = d + load_n(grad_sum + i, n);
        store_n(grad_x + i, d, n);
        store_n(grad_weight + i, Vec::fma(g, round_to(x, v * scale), load_n(grad_weight + i, n)), n);
      });
    }
  }
}

void rms_norm_backward(const RmsNormBackwardArgs& a, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? rms_norm_backward_range<float>(a, begin, end) : rms_norm_backward_range<bf16_t>(a, begin, end);
}

// y = silu(gate) up: grad_up = grad_y silu(gate), grad_gate = grad_y up s (1 + gate (1 - s)) with s the sigmoid.
template <class T>
void silu_mul_backward_range(const SiluMulBackwardArgs& a, int64_t begin, int64_t end) {
  const Vec one = Vec::splat(1.0f);
  for (int64_t t = begin; t < end; t++) {
    const T *gate = static_cast<const T*>(a.gate_up) + t * 2 * a.F, *up = gate + a.F;
    const T* grad_y = static_cast<const T*>(a.grad_y) + t * a.F;
    T *grad_gate = static_cast<T*>(a.grad_gate_up) + t * 2 * a.F, *grad_up = grad_gate + a.F;
    for_each_vec(a.F, [&](int64_t i, int n) {
      const Vec g = load_n(gate + i, n), grad = load_n(grad_y + i, n);
      const Vec sigmoid = one / (one + exp(Vec::zero() - g)), silu = g * sigmoid;
      store_n(grad_up + i, grad * round_to(gate, silu), n);
      store_n(grad_gate + i, grad * load_n(up + i, n) * Vec::fma(silu, one - sigmoid, sigmoid), n);
    });
  }
}

void silu_mul_backward(const SiluMulBackwardArgs& a, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? silu_mul_backward_range<float>(a, begin, end) : silu_mul_backward_range<bf16_t>(a, begin, end);
}

// (a, b) -> (a cos - b sin, b cos + a sin), or with BACK the transpose of that.
template <bool BACK, class T>
inline void turn(const T* x, const float* cos, const float* sin, T* out, int64_t half) {
  for_each_vec(half, [&](int64_t i, int n) {
    const Vec a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n);
    const Vec s = BACK ? Vec::zero() - load_n(sin + i, n) : load_n(sin + i, n);
    store_n(out + i, a * c - b * s, n);
    store_n(out + half + i, b * c + a * s, n);
  });
}

template <class T, bool MERGE>
void rotary_range(const RotaryArgs& a, int64_t begin, int64_t end) {
  const int64_t D = a.head_dim, half = D / 2;
  for (int64_t t = begin; t < end; t++) {
    const float *cos = a.cos + t * half, *sin = a.sin + t * half;
    T* fused = static_cast<T*>(a.qkv) + t * a.qkv_stride;
    auto heads = [&](void* p, int64_t stride, int64_t count, bool turned) {
      T* own = static_cast<T*>(p) + t * stride;
      for (int64_t h = 0; h < count; h++, own += D, fused += D) {
        const T* from = MERGE ? own : fused;
        T* to = MERGE ? fused : own;
        if (turned)
          turn<MERGE>(from, cos, sin, to, half);
        else
          for (int64_t i = 0; i < D; i++) to[i] = from[i];
      }
    };
    heads(a.q, a.q_stride, a.num_heads, true);
    heads(a.k, a.k_stride, a.num_kv_heads, true);
    heads(a.v, a.v_stride, a.num_kv_heads, false);
  }
}

void rotary_split(const RotaryArgs& a, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? rotary_range<float, false>(a, begin, end) : rotary_range<bf16_t, false>(a, begin, end);
}

void rotary_merge(const RotaryArgs& a, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? rotary_range<float, true>(a, begin, end) : rotary_range<bf16_t, true>(a, begin, end);
}

}  // namespace
