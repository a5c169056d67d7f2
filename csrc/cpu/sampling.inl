// A token by inversion of the cumulative distribution, with its log-probability, without writing the distribution anywhere.
//
// Three readings of the row: the maximum; the fp64 sum of exp(z - max) per block of the vocabulary; and, inside the one block
// where the cumulative sum passes u * total, the scan to the token. The order of the sums depends on the vocabulary alone.
#pragma once

namespace {

constexpr int64_t kMaxBlocks = 512;

inline int64_t vocabulary_block(int64_t V) {
  int64_t block = (V + kMaxBlocks - 1) / kMaxBlocks;
  block = (block + 63) / 64 * 64;
  return block < 256 ? 256 : block;
}

// f(i, z) with the vectors of logits / temperature from `begin` on; lanes behind the end are -inf, those of -inf logits too.
template <class T, class F>
inline void for_each_score(const T* logits, int64_t begin, int64_t end, float temperature, F f) {
  const Vec t = Vec::splat(temperature);
  const bool divide = temperature != 1.0f;
  for (int64_t i = begin; i < end; i += Vec::kWidth) {
    const int n = end - i < Vec::kWidth ? static_cast<int>(end - i) : Vec::kWidth;
    Vec z = load_n(logits + i, n);
    if (divide) z = z / t;
    f(i, n == Vec::kWidth ? z : Vec::keep_first(z, n, -__builtin_inff()));
  }
}

template <class T>
inline float row_max(const T* logits, int64_t V, float temperature) {
  Vec top[2] = {Vec::splat(-__builtin_inff()), Vec::splat(-__builtin_inff())};
  for_each_score(logits, 0, V, temperature, [&](int64_t i, Vec z) {
    Vec& m = top[i / Vec::kWidth % 2];
    m = Vec::max(m, z);
  });
  return Vec::max(top[0], top[1]).max();
}

template <class T>
inline int64_t first_equal(const T* logits, int64_t V, float value) {
  for (int64_t i = 0; i < V; i++)
    if (as_float(logits[i]) == value) return i;
  return 0;
}

// The first token of [begin, end) at which `sum` plus the weights up to it exceeds `target`; else the last one with a weight.
template <class T>
inline int64_t scan_block(const T* logits, int64_t begin, int64_t end, float temperature, float max, double sum, double target) {
  int64_t token = -1;
  bool found = false;
  const Vec shift = Vec::splat(max);
  for_each_score(logits, begin, end, temperature, [&](int64_t i, Vec z) {
    if (found) return;
    float weights[Vec::kWidth];
    exp(z - shift).store(weights);
    for (int j = 0; j < Vec::kWidth && !found && i + j < end; j++) {
      if (!(weights[j] > 0.0f)) continue;
      sum += static_cast<double>(weights[j]);
      token = i + j;
      found = sum > target;
    }
  });
  return token;
}

template <class T>
void sample_row(const SampleArgs& a, int64_t row) {
  const T* logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
  const bool greedy = a.temperature[row] == 0.0f;
  const float temperature = greedy ? 1.0f : a.temperature[row];
  const float max = row_max(logits, a.V, temperature);
  const int64_t block = vocabulary_block(a.V);
  const Vec shift = Vec::splat(max);
  double sums[kMaxBlocks], total = 0.0;
  for (int64_t b = 0; b * block < a.V; b++) {
    DoubleSum sum;
    const int64_t end = (b + 1) * block < a.V ? (b + 1) * block : a.V;
    for_each_score(logits, b * block, end, temperature, [&](int64_t, Vec z) { sum.add(exp(z - shift)); });
    sums[b] = sum.sum();
    total += sums[b];
  }

  int64_t token = -1;
  if (greedy) {
    token = first_equal(logits, a.V, max);
  } else {
    const double target = a.uniform[row] * total;
    double sum = 0.0, before = 0.0;
    int64_t last = 0;  // the last block with any weight: rounding may leave `target` just above every cumulative sum
    for (int64_t b = 0; b * block < a.V && !(sum > target); b++) {
      if (!(sums[b] > 0.0)) continue;
      last = b, before = sum;
      sum += sums[b];
    }
    const int64_t end = (last + 1) * block < a.V ? (last + 1) * block : a.V;
    token = scan_block(logits, last * block, end, temperature, max, before, target);
  }
  if (token < 0) token = 0;  // only NaN or all -inf logits get here; the log-probability says so
  const float logit = as_float(logits[token]), z = temperature == 1.0f ? logit : logit / temperature;
  a.token[row] = token;
  a.logprob[row] = static_cast<float>(static_cast<double>(z - max) - __builtin_log(total));
}

void sample(const SampleArgs& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++)
    a.dtype == Dtype::kFloat32 ? sample_row<float>(a, row) : sample_row<bf16_t>(a, row);
}

}  // namespace
