// What becomes of a tile's sums: biased and stored in the rows' type, or searched for the largest.
// Included once per instruction set, by linear_kernels.cpp.
#pragma once

#include "activations.h"
#include "linear_pack.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

template <class E>
inline void put_row(char* out, int64_t at, const float* row, int n) {
  typename E::T* p = reinterpret_cast<typename E::T*>(out) + at;
  int i = 0;
  for (; i + W <= n; i += W) E::store(p + i, load(row + i));
  if (i < n) store_some<E>(p + i, load(row + i), n - i);
}

template <class E>
inline void round_row(float* row, int n) {
  alignas(64) typename E::T lanes[W];
  for (int i = 0; i < n; i += W) {
    E::store(lanes, load(row + i));
    store(row + i, E::load(lanes));
  }
}

OCTAVO_INLINE bool any_not_below(vf x, float value) {
#if defined(OCTAVO_AVX512)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)splat(value), _CMP_NLT_UQ) != 0;
#elif defined(OCTAVO_AVX2)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)splat(value), _CMP_NLT_UQ)) != 0;
#else
  bool any = false;
  for (int i = 0; i < W; i++) any |= !(x[i] < value);
  return any;
#endif
}

// Few panels have anything that is as large as what was seen before them.
inline void search(const float* row, int n, int64_t first, Best& best) {
  for (int i = 0; i < n; i += W)
    if (any_not_below(load(row + i), best.value))
      for (int j = i; j < lesser(i + W, n); j++) best.see(row[j], static_cast<int32_t>(first + j));
}

// One row of one panel: biased, and stored or searched.
inline void deliver_row(const Product& c, float* row, int64_t r, int64_t panel) {
  const Panels& m = *c.panels;
  const int64_t first = panel * kPanel;
  const int n = static_cast<int>(m.outputs - first < kPanel ? m.outputs - first : kPanel);
  for (int i = 0; i < kPanel; i += W) {
    vf x = load(row + i);
    if (m.bias) x = x + load(m.bias + first + i);
    store(row + i, x);
  }
  if (c.out) {
    const int64_t at = r * c.out_stride + first;
    if (c.out_dtype == Dtype::f32) put_row<F32>(c.out, at, row, n);
    else if (c.out_dtype == Dtype::bf16) put_row<BF16>(c.out, at, row, n);
    else put_row<F16>(c.out, at, row, n);
    return;
  }
  if (c.out_dtype == Dtype::bf16) round_row<BF16>(row, kPanel);
  else if (c.out_dtype == Dtype::f16) round_row<F16>(row, kPanel);
  search(row, n, first, c.best[r]);
}

// Rows of a tile, each with its panels side by side.
inline void deliver(const Product& c, const Tile& tile, int64_t panel, int panels, float* row) {
  for (int r = 0; r < tile.rows; r++)
    for (int p = 0; p < panels; p++, row += kPanel) deliver_row(c, row, tile.first + r, panel + p);
}

// Both vectors of one row of a whole panel, straight from the registers that hold them.
template <class E, bool DOT>
OCTAVO_INLINE void store_both(char* out, int64_t at, vf a, vf b) {
  typename E::T* p = reinterpret_cast<typename E::T*>(out) + at;
#if defined(OCTAVO_AVX512)
  if constexpr (DOT && sizeof(typename E::T) == 2) {  // where there are dots of bfloat16, there is this
    vf both;
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(a), "v"(b));
    store(reinterpret_cast<float*>(p), both);
    return;
  }
#endif
  E::store(p, a);
  E::store(p + W, b);
}

// R rows' sums of panels, from registers: the first row's to `out`, panels side by side.
template <class E, bool DOT, int R, int P>
OCTAVO_INLINE void store_sums(const Product& c, int64_t panel, char* out, int64_t stride, vf (&sums)[P][R][2]) {
#pragma GCC unroll 4
  for (int p = 0; p < P; p++) {
    if (c.panels->bias) {
      const float* bias = c.panels->bias + (panel + p * (c.apart ? c.apart : 1)) * kPanel;
      vf a = load(bias), b = load(bias + W);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        sums[p][r][0] += a;
        sums[p][r][1] += b;
      }
    }
    int64_t at = p * kPanel;
#pragma GCC unroll 12
    for (int r = 0; r < R; r++, at += stride) store_both<E, DOT>(out, at, sums[p][r][0], sums[p][r][1]);
  }
}

// Rows of a tile whose gates lie at `gates` and what they are multiplied with at `by`, `stride` elements apart, both
// rounded to E: activated, rounded, multiplied and stored.
template <class E, bool DOT, Act A>
inline void gate_rows(const Product& c, const Tile& tile, int64_t panel, char* gates, const char* by, int64_t stride) {
  using T = typename E::T;
  for (int r = 0; r < tile.rows; r++) {
    T* gate = reinterpret_cast<T*>(gates) + r * stride;
    const T* other = reinterpret_cast<const T*>(by) + r * stride;
    store_both<E, DOT>(gates, r * stride, activated<A>(E::load(gate)), activated<A>(E::load(gate + W)));
    store_both<E, DOT>(c.out, (tile.first + r) * c.out_stride + panel * kPanel, E::load(gate) * E::load(other),
                       E::load(gate + W) * E::load(other + W));
  }
}

template <class E, bool DOT>
inline void gate_tile(const Product& c, const Tile& tile, int64_t panel, char* gates, const char* by, int64_t stride) {
  if (c.act == Act::silu) gate_rows<E, DOT, Act::silu>(c, tile, panel, gates, by, stride);
  else if (c.act == Act::gelu) gate_rows<E, DOT, Act::gelu>(c, tile, panel, gates, by, stride);
  else if (c.act == Act::gelu_tanh) gate_rows<E, DOT, Act::gelu_tanh>(c, tile, panel, gates, by, stride);
  else if (c.act == Act::relu) gate_rows<E, DOT, Act::relu>(c, tile, panel, gates, by, stride);
  else gate_rows<E, DOT, Act::relu_squared>(c, tile, panel, gates, by, stride);
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
