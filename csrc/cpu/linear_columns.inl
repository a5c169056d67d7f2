// y = x W^T (+ bias) where K is short: the columns of y in the lanes, over weights laid out for it. AVX2 only.
//
// As linear_short.inl, whose header says what is gained, for a CPU that has to widen bf16: a panel of two vectors of columns lies as
// [K][columns] in fp32 and as [K / 2][columns][2] in bf16, where a shift and a mask make two vectors of fp32 of one of pairs.
// An output is one sum over ascending k in one lane, plus the bias, whatever M is and in whichever of the two layouts.
#pragma once

namespace {

constexpr int kLanePanel = 2 * Vec::kWidth;
constexpr int64_t kStepsPerFetch = 16;

bool is_short(const LinearArgs& a) { return is_short_shape(a); }

// As many rows as leave registers for the weights: two sums a row, of 16 registers.
template <class W>
constexpr int kLaneRows = sizeof(W) == 4 ? 6 : 5;

// Eight words of eight rows, turned around.
inline void turn(const uint32_t* from, int64_t stride, uint32_t* to) {
  __m256 r[8], s[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(from + i * stride));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    s[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    s[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const __m256 a = s[4 * half + i], b = s[4 * half + 2 + i];
      r[4 * half + 2 * i] = _mm256_shuffle_ps(a, b, 0x44), r[4 * half + 2 * i + 1] = _mm256_shuffle_ps(a, b, 0xee);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(reinterpret_cast<float*>(to + i * kLanePanel), _mm256_permute2f128_ps(r[i], r[4 + i], 0x20));
    _mm256_storeu_ps(reinterpret_cast<float*>(to + (4 + i) * kLanePanel), _mm256_permute2f128_ps(r[i], r[4 + i], 0x31));
  }
}

// Columns [first, first + kLanePanel) of y as a panel; those behind N are zeros. A word is a weight in fp32 or a pair of them in bf16.
template <class W>
void lay_out_panel(const LinearArgs& a, int64_t first, W* panel) {
  constexpr int64_t kPerWord = 4 / static_cast<int64_t>(sizeof(W));
  const int64_t words = a.K / kPerWord;
  auto* out = reinterpret_cast<uint32_t*>(panel);
  for (int64_t c = 0; c < kLanePanel; c += Vec::kWidth) {
    const W* w = static_cast<const W*>(a.weight) + (first + c) * a.weight_stride;
    const bool turns = first + c + Vec::kWidth <= a.N && a.weight_stride % kPerWord == 0;
    int64_t k = 0;
    for (; turns && k + Vec::kWidth <= words; k += Vec::kWidth)
      turn(reinterpret_cast<const uint32_t*>(w) + k, a.weight_stride / kPerWord, out + k * kLanePanel + c);
    for (int64_t i = 0; i < Vec::kWidth; i++)
      for (int64_t j = k; j < words; j++) {
        uint32_t word = 0;
        if (first + c + i < a.N) __builtin_memcpy(&word, w + i * a.weight_stride + j * kPerWord, sizeof word);
        out[j * kLanePanel + c + i] = word;
      }
  }
}

// Adds x[k] * w[k] of the panel for k in [begin, end), both even, to the sums of ROWS rows.
template <int ROWS, class W>
inline __attribute__((always_inline)) void add_lanes(Vec (&sum)[ROWS][2], const float* x, int64_t x_stride, const W* panel,
                                                     int64_t begin, int64_t end) {
  auto add = [&](int64_t k, const Vec& w0, const Vec& w1) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      const Vec v = Vec::splat(x[r * x_stride + k]);
      sum[r][0] = Vec::fma(v, w0, sum[r][0]);
      sum[r][1] = Vec::fma(v, w1, sum[r][1]);
    }
  };
  panel += begin * kLanePanel;
  if constexpr (sizeof(W) == 4) {
    for (int64_t k = begin; k < end; k++, panel += kLanePanel) add(k, Vec::load(panel), Vec::load(panel + Vec::kWidth));
  } else {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    for (int64_t k = begin; k < end; k += 2, panel += 2 * kLanePanel) {
      const __m256i u0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel));
      const __m256i u1 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel + kLanePanel));
      add(k, {_mm256_castsi256_ps(_mm256_slli_epi32(u0, 16))}, {_mm256_castsi256_ps(_mm256_slli_epi32(u1, 16))});
      add(k + 1, {_mm256_castsi256_ps(_mm256_and_si256(u0, high))}, {_mm256_castsi256_ps(_mm256_and_si256(u1, high))});
    }
  }
}

}  // namespace
