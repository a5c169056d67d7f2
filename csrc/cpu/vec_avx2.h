// Eight fp32 lanes in one AVX2 register; the interface is that of vec_scalar.h, which explains each operation.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

struct Vec {
  static constexpr int kWidth = 8;
  __m256 v;

  static Vec zero() { return {_mm256_setzero_ps()}; }
  static Vec splat(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const bf16_t* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Vec load(const fp16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
  static Vec load_partial(const float* p, int n) { return {_mm256_maskload_ps(p, lane_mask(n))}; }
  template <class T>
  static Vec load_partial(const T* p, int n) {
    T lanes[kWidth] = {};
    for (int i = 0; i < n; i++) lanes[i] = p[i];
    return load(lanes);
  }

  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(bf16_t* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow()); }
  void store(fp16_t* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  template <class T>
  void store_partial(T* p, int n) const {
    T lanes[kWidth];
    store(lanes);
    for (int i = 0; i < n; i++) p[i] = lanes[i];
  }

  static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
  static Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
  static Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static Vec scale(Vec a, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
  }
  static Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
  }
  static Vec keep_first(Vec a, int n, float fill) {
    return {_mm256_blendv_ps(_mm256_set1_ps(fill), a.v, _mm256_castsi256_ps(lane_mask(n)))};
  }

  static void sum4(const Vec& a, const Vec& b, const Vec& c, const Vec& d, float* out) {
    __m256 t = add_pairs(add_pairs(a.v, b.v), add_pairs(c.v, d.v));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
  }
  float sum() const {
    float out[4];
    sum4(*this, *this, *this, *this, out);
    return out[0];
  }
  float max() const {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }

 private:
  // As _mm256_hadd_ps, which costs one operation more.
  static __m256 add_pairs(__m256 a, __m256 b) {
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
  }
  static __m256i lane_mask(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static Vec widen(__m128i h) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))}; }
  __m128i narrow() const {  // round to nearest even; NaN keeps its sign and becomes quiet
    __m256i u = _mm256_castps_si256(v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x00400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    __m256i h = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  }
};

// Outside the class: GCC 12 compiles friends defined inside without the target of the pragma.
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }

struct DoubleSum {
  __m256d low{}, high{};  // not _mm256_setzero_pd(): the pragma does not reach the implicit constructor
  void add(const Vec& x) {
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x.v)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1)));
  }
  double sum() const {
    double v[4];
    _mm256_storeu_pd(v, _mm256_add_pd(low, high));
    return (v[0] + v[1]) + (v[2] + v[3]);
  }
};

}  // namespace
