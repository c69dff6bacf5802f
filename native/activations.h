// What a gate is activated by, for a vector of one instruction set.
// Included once per instruction set, by the small operations of layers and by the linear kernels.
#pragma once

#include "rows.h"

namespace octavo {
namespace OCTAVO_ISA {

OCTAVO_INLINE vf exp_of(vf x) {  // where it is at most 2^127
  x *= splat(kLog2e);
  return exp2(where(x > splat(127.0f), splat(127.0f), x));
}

// erfc(x) for x >= 0, to a few units in the last place: t exp(-x^2 + P(t)), t = 1 / (1 + x / 2).
constexpr float kErfc[] = {0.17087277f, -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                           -0.18628806f, 0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f};

OCTAVO_INLINE vf erfc_above(vf x) {
  vf t = splat(1.0f) / fma(x, splat(0.5f), splat(1.0f));
  vf y = splat(kErfc[0]);
  for (int i = 1; i < 10; i++) y = fma(y, t, splat(kErfc[i]));
  return t * exp_of(y - x * x);
}

OCTAVO_INLINE vf gelu(vf x) {
  vf at = x * splat(0.70710678118654752f);
  vf upper = erfc_above(magnitude_of(at));
  return x * splat(0.5f) * where(at < splat(0.0f), upper, splat(2.0f) - upper);
}

OCTAVO_INLINE vf gelu_tanh(vf x) {
  vf inner = splat(0.79788456080286536f) * fma(splat(0.044715f) * x * x, x, x);
  return x * splat(0.5f) * (splat(1.0f) + tanh(inner));
}

// 1 / x for x from 1 to 2^127, to a unit in the last place.
OCTAVO_INLINE vf reciprocal(vf x) {
#if defined(OCTAVO_AVX512)
  vf near = (vf)_mm512_rcp14_ps((__m512)x);
  return fma(near, splat(1.0f) - x * near, near);
#else
  return splat(1.0f) / x;
#endif
}

template <Act A>
OCTAVO_INLINE vf activated(vf x) {
  if (A == Act::silu) return x * reciprocal(splat(1.0f) + exp_of(-x));
  if (A == Act::gelu) return gelu(x);
  if (A == Act::gelu_tanh) return gelu_tanh(x);
  vf above = where(x < splat(0.0f), vf{}, x);  // a NaN stays one
  return A == Act::relu ? above : above * above;
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
