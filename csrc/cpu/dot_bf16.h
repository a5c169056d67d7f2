// bf16 pairs on AVX512_BF16: each of the sixteen fp32 lanes gains two products, so that 32 elements meet per instruction.
// The instruction rounds to nearest even whatever the mode and takes denormals for zero.
#pragma once

namespace {

struct Bf16Dot {
  static constexpr int kWidth = 32;
  struct Operand {
    __m512i v;
  };
  static Operand load(const bf16_t* p) { return {_mm512_loadu_si512(p)}; }
  static Operand load_partial(const bf16_t* p, int n) {
    return {_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p)};
  }
  static Vec fma(Operand a, Operand b, Vec sum) {
    return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v))};
  }
};

}  // namespace

#define SAGC_BF16_DOT Bf16Dot
