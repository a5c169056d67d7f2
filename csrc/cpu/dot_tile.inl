// The one inner loop of all dense work: ROWS x COLS dot products at a time, with one vector accumulator each.
//
// Both operands are read along their contiguous dimension, so nothing has to be repacked. A dot product is always
// accumulated lane by lane in ascending order into one vector and reduced by the tree of Vec::sum4; which tile it falls into
// has no influence on its bits. With 16 registers 3 x 4 is the best tile: 12 accumulators, 3 inputs, 7 loads for 12
// multiply-adds. With 32 it is 6 x 4: 24 accumulators, 10 loads for 24. Both are bound by arithmetic.
#pragma once

namespace {

// How the elements of two rows meet: kWidth of them per vector, multiplied and added into fp32 lanes. A Dot is this or an
// instruction set's own (bf16 pairs on AVX512_BF16).
struct FloatDot {
  static constexpr int kWidth = Vec::kWidth;
  using Operand = Vec;
  template <class T>
  static Vec load(const T* p) { return Vec::load(p); }
  template <class T>
  static Vec load_partial(const T* p, int n) { return Vec::load_partial(p, n); }
  static Vec fma(Vec a, Vec b, Vec sum) { return Vec::fma(a, b, sum); }
};

// One row waits for its columns to come from memory. These follow each other there, and read one after the other they come
// as one stream, which the hardware fetches ahead; read side by side they are as many streams of a kilobyte each.

// out[r][c] (+)= dot(x row r, w row c) over `width` elements; beside() is called before every STRETCH of them.
template <class Dot, int ROWS, int COLS, bool ACCUMULATE, int64_t STRETCH, class X, class W, class Beside>
inline __attribute__((always_inline)) void dot_tile(const X* const* x, const W* const* w, int64_t width, float* const* out,
                                                    const Beside& beside) {
  static_assert(STRETCH % Dot::kWidth == 0, "of whole vectors");
  static_assert(COLS % 4 == 0, "four sums are reduced at a time");
  using Operand = typename Dot::Operand;
  Vec acc[ROWS][COLS];
  const X* xr[ROWS];
  const W* wc[COLS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) xr[r] = x[r];
#pragma GCC unroll 16
  for (int c = 0; c < COLS; c++) wc[c] = w[c];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) acc[r][c] = Vec::zero();

  // Columns [first, last) over k.
  auto accumulate = [&](int first, int last) __attribute__((always_inline)) {
    int64_t i = 0;
    for (const int64_t whole = width / Dot::kWidth * Dot::kWidth; i < whole;) {
      const int64_t stop = whole - i < STRETCH ? whole : i + STRETCH;
      beside();
#pragma GCC unroll(Vec::kWidth >= 16 ? 1 : 2)  // wide tiles are long enough
      for (; i < stop; i += Dot::kWidth) {
        Operand a[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) a[r] = Dot::load(xr[r] + i);
#pragma GCC unroll 16
        for (int c = first; c < last; c++) {
          Operand b = Dot::load(wc[c] + i);
#pragma GCC unroll 16
          for (int r = 0; r < ROWS; r++) acc[r][c] = Dot::fma(a[r], b, acc[r][c]);
        }
      }
    }
    if (i < width) {
      int n = static_cast<int>(width - i);
      Operand a[ROWS];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) a[r] = Dot::load_partial(xr[r] + i, n);
#pragma GCC unroll 16
      for (int c = first; c < last; c++) {
        Operand b = Dot::load_partial(wc[c] + i, n);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) acc[r][c] = Dot::fma(a[r], b, acc[r][c]);
      }
    }
  };
  if constexpr (ROWS == 1) {
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c++) accumulate(c, c + 1);
  } else {
    accumulate(0, COLS);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int c = 0; c < COLS; c += 4) {
      float sums[4];
      Vec::sum4(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3], sums);
      for (int j = 0; j < 4; j++) out[r][c + j] = ACCUMULATE ? out[r][c + j] + sums[j] : sums[j];
    }
}

}  // namespace
