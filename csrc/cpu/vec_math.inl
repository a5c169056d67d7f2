// Functions on Vec that need no instruction of their own.
#pragma once

namespace {

// e^x within about 1 ulp: 2^n * e^r with |r| <= ln(2) / 2, the polynomial fitted to (e^r - 1 - r) / r^2 for least relative
// error (3e-9). Below -87.3 the result is 0 (so that masked scores of -inf get no weight), above 88.3 it stays at e^88.3;
// NaN stays NaN.
inline Vec exp(Vec x) {
  const Vec low = Vec::splat(-87.3f);
  Vec clamped = Vec::min(Vec::splat(88.3f), Vec::max(low, x));
  Vec n = Vec::round(clamped * Vec::splat(1.44269504f));
  Vec r = Vec::fma(n, Vec::splat(-0.693359375f), clamped);  // ln(2) in two parts, the first exact in few bits
  r = Vec::fma(n, Vec::splat(2.12194440e-4f), r);
  Vec p = Vec::splat(1.3814540579915047e-3f);
  p = Vec::fma(p, r, Vec::splat(8.36874544620514e-3f));
  p = Vec::fma(p, r, Vec::splat(4.166838899254799e-2f));
  p = Vec::fma(p, r, Vec::splat(1.666652113199234e-1f));
  p = Vec::fma(p, r, Vec::splat(4.999999403953552e-1f));
  p = Vec::fma(p, r * r, r) + Vec::splat(1.0f);
  return Vec::select_less(x, low, Vec::zero(), Vec::scale(p, n));
}

inline float as_float(float x) { return x; }
inline float as_float(bf16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  __builtin_memcpy(&y, &bits, sizeof y);
  return y;
}

// x as it would be after being stored as T.
inline Vec round_to(const float*, Vec x) { return x; }
inline Vec round_to(const bf16_t*, Vec x) {
  bf16_t lanes[Vec::kWidth];
  x.store(lanes);
  return Vec::load(lanes);
}

// Calls f(i, n) for the lanes [i, i + n) of a row, whole vectors first.
template <class F>
inline void for_each_vec(int64_t width, F f) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= width; i += Vec::kWidth) f(i, Vec::kWidth);
  if (i < width) f(i, static_cast<int>(width - i));
}

template <class T>
inline Vec load_n(const T* p, int n) {
  return n == Vec::kWidth ? Vec::load(p) : Vec::load_partial(p, n);
}
template <class T>
inline void store_n(T* p, Vec x, int n) {
  if (n == Vec::kWidth)
    x.store(p);
  else
    x.store_partial(p, n);
}

}  // namespace
