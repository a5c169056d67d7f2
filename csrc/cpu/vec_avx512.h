// Sixteen fp32 lanes in one AVX-512 register; the interface is that of vec_scalar.h, which explains each operation.
// Needs AVX512F, BW, DQ and VL. Partial vectors use mask registers, so that they cost as much as whole ones.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace {

struct Vec {
  static constexpr int kWidth = 16;
  __m512 v;

  static Vec zero() { return {_mm512_setzero_ps()}; }
  static Vec splat(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bf16_t* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const fp16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
  static Vec load_partial(const float* p, int n) { return {_mm512_maskz_loadu_ps(lane_mask(n), p)}; }
  static Vec load_partial(const bf16_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(lane_mask(n), p)); }
  static Vec load_partial(const fp16_t* p, int n) { return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lane_mask(n), p))}; }

  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(bf16_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow()); }
  void store(fp16_t* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half()); }
  void store_partial(float* p, int n) const { _mm512_mask_storeu_ps(p, lane_mask(n), v); }
  void store_partial(bf16_t* p, int n) const { _mm256_mask_storeu_epi16(p, lane_mask(n), narrow()); }
  void store_partial(fp16_t* p, int n) const { _mm256_mask_storeu_epi16(p, lane_mask(n), half()); }

  static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
  static Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
  static Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
  static Vec scale(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
  static Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
  }
  static Vec keep_first(Vec a, int n, float fill) {
    return {_mm512_mask_blend_ps(lane_mask(n), _mm512_set1_ps(fill), a.v)};
  }

  static void sum4(const Vec& a, const Vec& b, const Vec& c, const Vec& d, float* out) {
    _mm_storeu_ps(out, sums(add_pairs(add_pairs(a.v, b.v), add_pairs(c.v, d.v))));
  }
  float sum() const {
    __m512 t = add_pairs(v, v);
    return _mm_cvtss_f32(sums(add_pairs(t, t)));
  }
  float max() const {
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }

 private:
  static __mmask16 lane_mask(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
  // Within each quarter of the register: the sums of neighbouring lanes, those of a before those of b.
  static __m512 add_pairs(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
  }
  // The sum of the four quarters.
  static __m128 sums(__m512 t) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(t), _mm512_extractf32x8_ps(t, 1));
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  }
  static Vec widen(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
  __m256i half() const { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
  // Round to nearest even; NaN keeps its sign and becomes quiet.
#ifdef SAGC_BF16_INSTRUCTIONS  // one instead of nine, which takes denormals for zero
  __m256i narrow() const { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)); }
#else
  __m256i narrow() const {
    __m512i u = _mm512_castps_si512(v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, u, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }
#endif
};

// Outside the class: GCC 12 compiles friends defined inside without the target of the pragma.
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }

struct DoubleSum {
  __m512d low{}, high{};  // not _mm512_setzero_pd(): the pragma does not reach the implicit constructor
  void add(const Vec& x) {
    low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
    high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
  }
  double sum() const {
    double v[8];
    _mm512_storeu_pd(v, _mm512_add_pd(low, high));
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
};

}  // namespace
