// Eight fp32 lanes in plain C++: the baseline that runs on every CPU, and the definition of what a Vec must offer.
//
// All vector kernels are templates over nothing but the name Vec, so that the same source gives every instruction set. A Vec
// has kWidth lanes; sums over lanes follow one tree, ((0+1)+(2+3)) + ((4+5)+(6+7)), in sum4 for each of its four vectors.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Vec {
  static constexpr int kWidth = 8;
  float v[kWidth];

  template <class F>
  static Vec map(F f) {
    Vec r;
    for (int i = 0; i < kWidth; i++) r.v[i] = f(i);
    return r;
  }

  static Vec zero() { return splat(0.0f); }
  static Vec splat(float x) {
    return map([&](int) { return x; });
  }
  static Vec load(const float* p) {
    Vec r;
    std::memcpy(r.v, p, sizeof r.v);
    return r;
  }
  static Vec load(const bf16_t* p) {
    return map([&](int i) { return widen(p[i]); });
  }
  static Vec load(const fp16_t* p) {
    return map([&](int i) { return widen(p[i]); });
  }
  // The first n lanes from memory, the others zero; nothing behind p + n is read.
  template <class T>
  static Vec load_partial(const T* p, int n) {
    T lanes[kWidth] = {};
    for (int i = 0; i < n; i++) lanes[i] = p[i];
    return load(lanes);
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
  void store(bf16_t* p) const {
    for (int i = 0; i < kWidth; i++) p[i] = narrow(v[i]);
  }
  void store(fp16_t* p) const {
    for (int i = 0; i < kWidth; i++) p[i] = half(v[i]);
  }
  template <class T>
  void store_partial(T* p, int n) const {
    T lanes[kWidth];
    store(lanes);
    for (int i = 0; i < n; i++) p[i] = lanes[i];
  }

  // a * b + c; rounded once where the instruction set has a fused multiply-add, twice here.
  static Vec fma(Vec a, Vec b, Vec c) {
    return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  friend Vec operator+(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] + b.v[i]; });
  }
  friend Vec operator-(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] - b.v[i]; });
  }
  friend Vec operator*(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] * b.v[i]; });
  }
  friend Vec operator/(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] / b.v[i]; });
  }
  // As the x86 instructions: b where either is NaN.
  static Vec max(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static Vec min(Vec a, Vec b) {
    return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static Vec round(Vec a) {
    return map([&](int i) { return std::nearbyint(a.v[i]); });
  }
  // a * 2^n for whole n in [-126, 127]; anything where n is NaN and a is too.
  static Vec scale(Vec a, Vec n) {
    return map([&](int i) {
      uint32_t bits = static_cast<uint32_t>(n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) + 127 : 127) << 23;
      return a.v[i] * from_bits(bits);
    });
  }
  static Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
    return map([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
  }
  static Vec keep_first(Vec a, int n, float fill) {
    return map([&](int i) { return i < n ? a.v[i] : fill; });
  }

  // out[0..3] = the sum over the lanes of a, b, c and d.
  static void sum4(const Vec& a, const Vec& b, const Vec& c, const Vec& d, float* out) {
    out[0] = a.sum(), out[1] = b.sum(), out[2] = c.sum(), out[3] = d.sum();
  }
  float sum() const { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }
  float max() const {
    float m = v[0];
    for (int i = 1; i < kWidth; i++) m = m > v[i] ? m : v[i];
    return m;
  }

 private:
  static float from_bits(uint32_t bits) {
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
  }
  static float widen(bf16_t h) { return from_bits(static_cast<uint32_t>(h.bits) << 16); }
  static float widen(fp16_t h) {
    const uint32_t sign = (h.bits & 0x8000u) << 16, magnitude = h.bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    // The exponent stands 112 too low; the multiplication mends that, also for denormals.
    return from_bits(sign | 0x77800000u) * from_bits(magnitude << 13);
  }
  static fp16_t half(float f) {  // round to nearest even
    uint32_t u;
    std::memcpy(&u, &f, sizeof u);
    const uint32_t sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | (u >> 13 & 0x3ffu))};
    if (u >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (u < 0x38800000u) {  // denormal: adding 0.5 leaves its bits, rounded, at the end of the sum's
      const float sum = from_bits(u) + 0.5f;
      std::memcpy(&u, &sum, sizeof u);
      return {static_cast<uint16_t>(sign | (u - 0x3f000000u))};
    }
    return {static_cast<uint16_t>(sign | ((u + 0xc8000fffu + (u >> 13 & 1u)) >> 13))};
  }
  static bf16_t narrow(float f) {  // round to nearest even; NaN keeps its sign and becomes quiet
    uint32_t u;
    std::memcpy(&u, &f, sizeof u);
    u = f != f ? u | 0x00400000u : u + 0x7fffu + ((u >> 16) & 1u);
    return {static_cast<uint16_t>(u >> 16)};
  }
};

// Sums of fp32 lanes in fp64.
struct DoubleSum {
  double v[Vec::kWidth] = {};
  void add(const Vec& x) {
    for (int i = 0; i < Vec::kWidth; i++) v[i] += static_cast<double>(x.v[i]);
  }
  double sum() const { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }
};

}  // namespace
