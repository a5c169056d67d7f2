// y = x W^T (+ bias) in bf16 where K is short: the columns of y in the lanes, over weights laid out for it. AVX512_BF16 only.
//
// With k in the lanes (linear.inl) an output ends in a sum across them, which at K = 288 is a fifth of the instructions. Here a
// panel of two vectors of columns lies as [K / 2][columns][2], a pair of k per lane and instruction; an output is one sum over
// ascending pairs in one lane, plus the bias, whatever M is. A decoder lays its weights out once per generate call, the
// operator a panel at a time while it multiplies: the same sums, the same bits. Which products are short depends on K and N
// alone, and is kept to matrices of which a second copy is small (8 MB at most).
#pragma once

namespace {

constexpr int64_t kShortK = 512, kShortColumns = 8192;  // at most
constexpr int64_t kMostShortK = kShortK;
constexpr int kLanePanel = 2 * Vec::kWidth;
template <class W>
constexpr int kLaneRows = 8;  // two sums a row; twelve rows are slower at every M
constexpr int64_t kStepsPerFetch = 32;

bool is_short(const LinearArgs& a) {
  return meets_in_bf16(a) && a.K > 0 && a.K <= kShortK && a.K % 2 == 0 && a.N <= kShortColumns;
}

// Columns [first, first + kLanePanel) of y as a panel; those behind N are zeros.
void lay_out_panel(const LinearArgs& a, int64_t first, bf16_t* out) {
  const int64_t columns = a.N - first;
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  for (int64_t c = 0; c < kLanePanel; c += Vec::kWidth) {
    const int64_t n = columns - c;
    const __mmask16 there = n >= Vec::kWidth ? 0xffff : n > 0 ? static_cast<__mmask16>((1u << n) - 1) : 0;
    const bf16_t* w = static_cast<const bf16_t*>(a.weight) + (first + (n > 0 ? c : 0)) * a.weight_stride;
    const __m512i offset = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(a.weight_stride)));
    for (int64_t k = 0; k < a.K; k += 2)
      _mm512_storeu_si512(out + k * kLanePanel + c * 2,
                          _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, offset, w + k, sizeof(bf16_t)));
  }
}

// Adds x[k] * w[k] of the panel for k in [begin, end), both even, to the sums of ROWS rows.
template <int ROWS>
inline __attribute__((always_inline)) void add_lanes(Vec (&sum)[ROWS][2], const bf16_t* x, int64_t x_stride, const bf16_t* panel,
                                                     int64_t begin, int64_t end) {
  const bf16_t* xr[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) xr[r] = x + r * x_stride;
  panel += begin * kLanePanel;
  for (int64_t k = begin; k < end; k += 2, panel += 2 * kLanePanel) {
    const Bf16Dot::Operand w0 = Bf16Dot::load(panel), w1 = Bf16Dot::load(panel + kLanePanel);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
      int pair;
      __builtin_memcpy(&pair, xr[r] + k, sizeof pair);
      const Bf16Dot::Operand v{_mm512_set1_epi32(pair)};
      sum[r][0] = Bf16Dot::fma(v, w0, sum[r][0]);
      sum[r][1] = Bf16Dot::fma(v, w1, sum[r][1]);
    }
  }
}

}  // namespace
