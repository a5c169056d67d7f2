// y = x W^T (+ bias) in bf16 where K is short: the columns of y in the lanes, over weights laid out for it. AVX512_BF16 only.
//
// With k in the lanes (linear.inl) an output ends in a sum across them, which at K = 288 is a fifth of the instructions. Here a
// panel of two vectors of columns lies as [K / 2][columns][2], a pair of k per lane and instruction; an output is one sum over
// ascending pairs in one lane, plus the bias, whatever M is. A decoder lays its weights out once per generate call, the
// operator a panel at a time while it multiplies: the same sums, the same bits. Which products are short depends on K and N
// alone (is_short_shape).
#pragma once

namespace {

constexpr int kLanePanel = 2 * Vec::kWidth;
template <class W>
constexpr int kLaneRows = 8;  // two sums a row; twelve rows are slower at every M
constexpr int64_t kStepsPerFetch = 32;

bool is_short(const LinearArgs& a) { return meets_in_bf16(a) && is_short_shape(a); }

// Sixteen rows of sixteen 32-bit numbers become sixteen columns.
inline __attribute__((always_inline)) void turn_around(__m512i (&row)[16]) {
  __m512i t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {  // pairs of rows
    t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4)  // row[i + j]: number j of each quarter of four rows
#pragma GCC unroll 16
    for (int j = 0; j < 2; j++) {
      row[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      row[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
#pragma GCC unroll 16
  for (int j = 0; j < 4; j++) {  // quarters change places with fours of rows
    const __m512i a = _mm512_shuffle_i32x4(row[j], row[4 + j], 0x88), b = _mm512_shuffle_i32x4(row[8 + j], row[12 + j], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(row[j], row[4 + j], 0xdd), d = _mm512_shuffle_i32x4(row[8 + j], row[12 + j], 0xdd);
    t[j] = _mm512_shuffle_i32x4(a, b, 0x88), t[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
    t[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88), t[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) row[i] = t[i];
}

// Columns [first, first + kLanePanel) of y as a panel; those behind N are zeros.
void lay_out_panel(const LinearArgs& a, int64_t first, bf16_t* out) {
  for (int64_t c = 0; c < kLanePanel; c += Vec::kWidth) {
    const bf16_t* w = static_cast<const bf16_t*>(a.weight) + (first + c) * a.weight_stride;
    for (int64_t k = 0; k < a.K; k += Bf16Dot::kWidth) {
      const int64_t left = a.K - k, pairs = (left < Bf16Dot::kWidth ? left : Bf16Dot::kWidth) / 2;
      __m512i pair[16];
#pragma GCC unroll 16
      for (int64_t i = 0; i < Vec::kWidth; i++)
        pair[i] = first + c + i < a.N
                      ? _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << pairs) - 1), w + i * a.weight_stride + k)
                      : _mm512_setzero_si512();
      turn_around(pair);
#pragma GCC unroll 16
      for (int64_t i = 0; i < Vec::kWidth; i++)
        if (i < pairs) _mm512_storeu_si512(out + (k + 2 * i) * kLanePanel + 2 * c, pair[i]);
    }
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
