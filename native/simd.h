// Vectors of floats as wide as the instruction set that the including file is compiled for, in the vector
// extensions that GCC and Clang share. Everything is in the namespace OCTAVO_ISA, so that copies compiled for
// different instruction sets never replace each other at link time. x86 intrinsics serve where the compilers do
// not find the instruction by themselves; without OCTAVO_AVX2 or OCTAVO_AVX512 there are none.
#pragma once

#include <cstdint>
#include <cstring>

#include "types.h"

#if defined(OCTAVO_AVX512) || defined(OCTAVO_AVX2)
#include <immintrin.h>
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace octavo {
namespace OCTAVO_ISA {

#if defined(OCTAVO_AVX512)
constexpr int W = 16;  // lanes
#elif defined(OCTAVO_AVX2)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
typedef uint8_t vb __attribute__((vector_size(W)));
typedef int8_t vc __attribute__((vector_size(W)));
typedef float vf_any __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t vi_any __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * W), aligned(2), may_alias));
typedef uint8_t vb_any __attribute__((vector_size(W), aligned(1), may_alias));
typedef int8_t vc_any __attribute__((vector_size(W), aligned(1), may_alias));

constexpr float kNone = -__builtin_huge_valf();

// Least largest relative error on [-0.5, 0.5]: 2^x = 1 + x (...), error 9e-8.
constexpr float kExp2[] = {0x1.5bba14p-10f, 0x1.3cea88p-7f, 0x1.c6b752p-5f, 0x1.ebf9bcp-3f, 0x1.62e42ap-1f, 1.0f};
// Least largest relative error on [0, 1) of a cubic that is 1 at 0: 9e-5.
constexpr float kExp2Short[] = {0x1.3baaacp-4f, 0x1.d23786p-3f, 0x1.63e65ap-1f, 1.0f};
// On [0, 0.65]: tanh(x) = x (1 + x^2 (...)), error 3e-10 before rounding.
constexpr float kTanh[] = {0.002059580758213997f, -0.008085626177489758f, 0.021663403138518333f,
                           -0.05393994227051735f, 0.1333315223455429f, -0.333333283662796f};

OCTAVO_INLINE vf splat(float x) { return x - vf{}; }
OCTAVO_INLINE vi splat(int32_t x) { return x - vi{}; }
OCTAVO_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_any*>(p); }
OCTAVO_INLINE vi load(const int32_t* p) { return *reinterpret_cast<const vi_any*>(p); }
OCTAVO_INLINE void store(float* p, vf x) { *reinterpret_cast<vf_any*>(p) = x; }

// The sets that have fused multiply-add get it by contraction (-ffp-contract=fast).
OCTAVO_INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }

// b where a is NaN: a NaN among scores leaves the maximum alone and shows in the weights.
OCTAVO_INLINE vf greater(vf a, vf b) {
#if defined(OCTAVO_AVX512)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(OCTAVO_AVX2)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
OCTAVO_INLINE vf magnitude_of(vf x) { return (vf)((vi)x & 0x7fffffff); }
OCTAVO_INLINE vf where(vi mask, vf a, vf b) { return mask ? a : b; }

// ---- element types ----

struct F32 {
  using T = float;
  static OCTAVO_INLINE vf load(const T* p) { return OCTAVO_ISA::load(p); }
  static OCTAVO_INLINE void store(T* p, vf x) { OCTAVO_ISA::store(p, x); }
};

struct BF16 {
  using T = uint16_t;
  static OCTAVO_INLINE vf load(const T* p) {
    vh half = *reinterpret_cast<const vh_any*>(p);
    return (vf)(__builtin_convertvector(half, vu) << 16);
  }
  static OCTAVO_INLINE void store(T* p, vf x) {  // to the nearest, ties to even; a NaN stays one
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vu quiet = (bits >> 16) | 0x40u;
    vu chosen = (x == x) ? rounded : quiet;
    *reinterpret_cast<vh_any*>(p) = __builtin_convertvector(chosen, vh);
#endif
  }
};

struct F16 {
  using T = uint16_t;
  static OCTAVO_INLINE vf load(const T* p) {
#if defined(OCTAVO_AVX512)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(OCTAVO_AVX2)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    vu half = __builtin_convertvector(*reinterpret_cast<const vh_any*>(p), vu);
    vu magnitude = (half & 0x7fffu) << 13;
    vf scaled = (vf)magnitude * splat(0x1p112f);  // exact, subnormals included
    vu wide = (vu)scaled;
    vu special = magnitude | 0x7f800000u;  // infinity or NaN
    wide = ((half & 0x7c00u) == 0x7c00u) ? special : wide;
    return (vf)(wide | ((half & 0x8000u) << 16));
#endif
  }
  static OCTAVO_INLINE void store(T* p, vf x) {
#if defined(OCTAVO_AVX512)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(OCTAVO_AVX2)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    vu bits = (vu)x;
    vu sign = (bits >> 16) & 0x8000u;
    vu magnitude = bits & 0x7fffffffu;
    // Normal halves: move the exponent and round at bit 13. Smaller ones: an addition aligns and rounds them.
    vu normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    vu small = (vu)((vf)magnitude + splat(0.5f)) - 0x3f000000u;
    vu half = (magnitude < 0x38800000u) ? small : normal;
    half = (magnitude >= 0x477ff000u) ? splat_bits(0x7c00u) : half;
    half = (magnitude > 0x7f800000u) ? splat_bits(0x7e00u) : half;
    *reinterpret_cast<vh_any*>(p) = __builtin_convertvector(half | sign, vh);
#endif
  }
  static OCTAVO_INLINE vu splat_bits(uint32_t x) { return x - vu{}; }
};

// Numbers of one row in eight bits, to be multiplied by the row's scale. What comes here to be stored is at most
// kLargest in size, or NaN: then the scale is not finite, and says so.
struct I8 {
  using T = int8_t;
  static constexpr float kLargest = 127.0f;
  static OCTAVO_INLINE vf load(const T* p) {
#if defined(OCTAVO_AVX512)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(OCTAVO_AVX2)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    return __builtin_convertvector(__builtin_convertvector(*reinterpret_cast<const vc_any*>(p), vi), vf);
#endif
  }
  static OCTAVO_INLINE void store(T* p, vf x) {  // to the nearest, ties to even
    vi whole = (vi)(x + splat(0x1.8p23f)) - splat(0x4b400000);
    *reinterpret_cast<vc_any*>(p) = __builtin_convertvector(whole, vc);
  }
};

struct E4M3 {  // sign, 4 bits of exponent (bias 7), 3 of fraction; subnormals, no infinity
  using T = uint8_t;
  static constexpr float kLargest = 448.0f;
  static OCTAVO_INLINE vf load(const T* p) {
#if defined(OCTAVO_AVX512)
    vu byte = (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(OCTAVO_AVX2)
    vu byte = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
    vu byte = __builtin_convertvector(*reinterpret_cast<const vb_any*>(p), vu);
#endif
    vf size = (vf)((byte & 0x7fu) << 20) * splat(0x1p120f);  // exact, subnormals included
    return (vf)((vu)size | ((byte & 0x80u) << 24));
  }
  static OCTAVO_INLINE void store(T* p, vf x) {
    vu bits = (vu)x, magnitude = bits & 0x7fffffffu;
    vu normal = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    vu small = (vu)((vf)magnitude + splat(0x1p14f)) - 0x46800000u;  // an addition aligns and rounds it
    vu byte = ((magnitude < 0x3c800000u) ? small : normal) | ((bits >> 24) & 0x80u);
    *reinterpret_cast<vb_any*>(p) = __builtin_convertvector(byte, vb);
  }
};

// The first n < W elements, zero behind them.
template <class E>
OCTAVO_INLINE vf load_some(const typename E::T* p, int n) {
  alignas(64) typename E::T lanes[W] = {};
  for (int i = 0; i < n; i++) lanes[i] = p[i];
  return E::load(lanes);
}
template <class E>
OCTAVO_INLINE void store_some(typename E::T* p, vf x, int n) {
  alignas(64) typename E::T lanes[W];
  E::store(lanes, x);
  for (int i = 0; i < n; i++) p[i] = lanes[i];
}

// Pairs of bfloat16 in 32 bits. Only AVX-512's kernels for processors that add their products come here, and write the
// instructions out: the compiler may not use them anywhere else.
#if defined(OCTAVO_AVX512)
typedef int32_t pair_any __attribute__((aligned(2), may_alias));
OCTAVO_INLINE vf splat_pair(const void* p) { return (vf)splat(*static_cast<const pair_any*>(p)); }
OCTAVO_INLINE vf dot_pairs(vf a, vf b, vf sum) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
// To the nearest. A NaN stays one: those of bfloat16 inputs have zeros in their low half.
OCTAVO_INLINE vf pair(vf even, vf odd) {
  vu low = ((vu)even + 0x8000u) >> 16, high = ((vu)odd + 0x8000u) & 0xffff0000u;
  return (vf)(low | high);
}
#else
OCTAVO_INLINE vf pair(vf even, vf) { return even; }  // never called
#endif
OCTAVO_INLINE void store_rounded(void* p, vf x) {
  vh half = __builtin_convertvector(((vu)x + 0x8000u) >> 16, vh);
  std::memcpy(p, &half, sizeof(half));
}

// ---- functions ----

// 2^x to half a unit in the last place or so, for x <= 127; below 2^-126 it stays there, NaN stays NaN.
OCTAVO_INLINE vf exp2(vf x) {
  x = greater(splat(-126.0f), x);
  vf shifted = x + splat(0x1.8p23f);  // the integer nearest to x is in the low bits
  vf f = x - (shifted - splat(0x1.8p23f));
  vf y = splat(kExp2[0]);
  for (int i = 1; i < 6; i++) y = fma(y, f, splat(kExp2[i]));
  return (vf)((vi)y + ((vi)shifted << 23));
}

// 2^x to a ten-thousandth of itself: for what is rounded to bfloat16. Of minus infinity zero.
OCTAVO_INLINE vf exp2_short(vf x) {
#if defined(OCTAVO_AVX512)
  vf f = (vf)_mm512_reduce_ps((__m512)x, 0x09);  // what is left above the integer below
  vf y = splat(kExp2Short[0]);
  for (int i = 1; i < 4; i++) y = fma(y, f, splat(kExp2Short[i]));
  return (vf)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
  return exp2(x);  // never called
#endif
}

// tanh: an odd polynomial near zero, where the other form cancels.
OCTAVO_INLINE vf tanh(vf x) {
  vf size = magnitude_of(x);
  vf square = x * x;
  vf y = splat(kTanh[0]);
  for (int i = 1; i < 6; i++) y = fma(y, square, splat(kTanh[i]));
  vf near = x * fma(y, square, splat(1.0f));
  vf bounded = where(size > splat(20.0f), splat(20.0f), size);
  vf far = splat(1.0f) - splat(2.0f) / (exp2(bounded * splat(2.8853900817779268f)) + splat(1.0f));
  far = (vf)((vi)far | ((vi)x & (int32_t)0x80000000));
  return where(size < splat(0.625f), near, far);
}

// Over the lanes, in pairs.
OCTAVO_INLINE float sum(vf x) {
#if defined(OCTAVO_AVX512)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float left[W];
  for (int i = 0; i < W; i++) left[i] = x[i];
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) left[i] += left[i + n];
  return left[0];
#endif
}
OCTAVO_INLINE float largest(vf x) {
#if defined(OCTAVO_AVX512)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float left[W];
  for (int i = 0; i < W; i++) left[i] = x[i];
  for (int n = W / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) left[i] = left[i + n] > left[i] ? left[i + n] : left[i];
  return left[0];
#endif
}

#if defined(__clang__) || __GNUC__ >= 12
#define OCTAVO_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define OCTAVO_PICK(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// Sums over the lanes of four vectors, the four results in each 128-bit part still to be added over the parts.
OCTAVO_INLINE vf fold2(vf a, vf b) {
#if defined(OCTAVO_AVX512)
  return (vf)_mm512_unpacklo_ps((__m512)a, (__m512)b) + (vf)_mm512_unpackhi_ps((__m512)a, (__m512)b);
#elif defined(OCTAVO_AVX2)
  return (vf)_mm256_unpacklo_ps((__m256)a, (__m256)b) + (vf)_mm256_unpackhi_ps((__m256)a, (__m256)b);
#else
  return OCTAVO_PICK(a, b, 0, 4, 1, 5) + OCTAVO_PICK(a, b, 2, 6, 3, 7);
#endif
}
OCTAVO_INLINE vf fold4(vf a, vf b, vf c, vf d) {
  vf ab = fold2(a, b), cd = fold2(c, d);
#if defined(OCTAVO_AVX512)
  return (vf)_mm512_shuffle_ps((__m512)ab, (__m512)cd, 0x44) + (vf)_mm512_shuffle_ps((__m512)ab, (__m512)cd, 0xee);
#elif defined(OCTAVO_AVX2)
  return (vf)_mm256_shuffle_ps((__m256)ab, (__m256)cd, 0x44) + (vf)_mm256_shuffle_ps((__m256)ab, (__m256)cd, 0xee);
#else
  return OCTAVO_PICK(ab, cd, 0, 1, 4, 5) + OCTAVO_PICK(ab, cd, 2, 3, 6, 7);
#endif
}

// The sums over lanes of each of kBlock accumulators, stored one after the other.
#if defined(OCTAVO_AVX512)
constexpr int kBlock = 8;
OCTAVO_INLINE void store_sums(float* p, const vf (&a)[kBlock]) {
  __m512 low = (__m512)fold4(a[0], a[1], a[2], a[3]), high = (__m512)fold4(a[4], a[5], a[6], a[7]);
  __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x44), _mm512_shuffle_f32x4(low, high, 0xee));
  y = _mm512_shuffle_f32x4(y, y, 0xd8);  // parts low, high, low, high
  _mm256_storeu_ps(p, _mm256_add_ps(_mm512_castps512_ps256(y), _mm512_extractf32x8_ps(y, 1)));
}
#else
constexpr int kBlock = 4;
OCTAVO_INLINE void store_sums(float* p, const vf (&a)[kBlock]) {
  vf y = fold4(a[0], a[1], a[2], a[3]);
#if defined(OCTAVO_AVX2)
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128((__m256)y), _mm256_extractf128_ps((__m256)y, 1)));
#else
  store(p, y);
#endif
}
#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
