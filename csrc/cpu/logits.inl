// Log-probability and entropy of a row of logits, and the gradient of the logits in their place. Whole rows come in forward;
// backward knows the log-sum-exp and takes any range of columns.
#pragma once

namespace {

// One pass for the maximum, one for the sums of e^(z - max) and of (z - max) e^(z - max): entropy = log(sum) - weighted / sum.
template <class T>
void logits_stats_range(const LogitsArgs& a, int64_t begin, int64_t end) {
  const Vec scale = Vec::splat(a.scale);
  for (int64_t r = begin; r < end; r++) {
    const T* z = static_cast<const T*>(a.logits) + r * a.stride;
    Vec top[2] = {Vec::splat(-__builtin_inff()), Vec::splat(-__builtin_inff())};
    for_each_vec(a.width, [&](int64_t i, int n) {
      Vec& m = top[i / Vec::kWidth % 2];
      m = Vec::max(m, Vec::keep_first(load_n(z + i, n), n, -__builtin_inff()));
    });
    const float max = Vec::max(top[0], top[1]).max() * a.scale;
    const Vec shift = Vec::splat(max);
    DoubleSum total, weighted;
    // fp32 within a block, fp64 between blocks.
    constexpr int64_t kBlock = 64 * Vec::kWidth;
    for (int64_t first = 0; first < a.width; first += kBlock) {
      Vec sum = Vec::zero(), moment = Vec::zero();
      const int64_t count = a.width - first < kBlock ? a.width - first : kBlock;
      for_each_vec(count, [&](int64_t i, int n) {
        const Vec d = load_n(z + first + i, n) * scale - shift;
        const Vec e = n == Vec::kWidth ? exp(d) : Vec::keep_first(exp(d), n, 0.0f);
        sum = sum + e;
        // A difference of -inf has no weight; times zero it would be NaN.
        moment = Vec::fma(Vec::max(d, Vec::splat(-128.0f)), e, moment);
      });
      total.add(sum), weighted.add(moment);
    }
    const double sum = total.sum(), log_sum = __builtin_log(sum);
    const float target = as_float(z[a.targets[r]]) * a.scale;
    a.lse[r] = static_cast<float>(max + log_sum);
    a.logprob[r] = static_cast<float>((static_cast<double>(target) - max) - log_sum);
    a.entropy[r] = static_cast<float>(log_sum - weighted.sum() / sum);
  }
}

void logits_stats(const LogitsArgs& a, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? logits_stats_range<float>(a, begin, end) : logits_stats_range<bf16_t>(a, begin, end);
}

// With p the probabilities: d logprob / dz = onehot - p, d entropy / dz = -p (log p + entropy); both over the temperature.
template <class T>
void logits_grad_range(const LogitsArgs& a, int64_t begin, int64_t end) {
  const Vec scale = Vec::splat(a.scale), lowest = Vec::splat(-128.0f);
  for (int64_t r = begin; r < end; r++) {
    T* z = static_cast<T*>(a.logits) + r * a.stride;
    const Vec lse = Vec::splat(a.lse[r]), grad_logprob = Vec::splat(a.grad_logprob[r] * a.scale);
    const Vec grad_entropy = Vec::splat(a.grad_entropy[r] * a.scale), entropy = Vec::splat(a.entropy[r]);
    const int64_t target = a.targets[r] - a.first_column;
    const bool is_here = target >= 0 && target < a.width;
    const float chosen = is_here ? as_float(z[target]) : 0.0f;
    auto gradient = [&](Vec x) {
      const Vec logp = x * scale - lse;
      return Vec::zero() - exp(logp) * Vec::fma(Vec::max(logp, lowest) + entropy, grad_entropy, grad_logprob);
    };
    for_each_vec(a.width, [&](int64_t i, int n) { store_n(z + i, gradient(load_n(z + i, n)), n); });
    if (is_here) (gradient(Vec::splat(chosen)) + grad_logprob).store_partial(z + target, 1);
  }
}

void logits_grad(const LogitsArgs& a, int64_t begin, int64_t end) {
  a.dtype == Dtype::kFloat32 ? logits_grad_range<float>(a, begin, end) : logits_grad_range<bf16_t>(a, begin, end);
}

}  // namespace
