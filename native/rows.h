// What both kernels share: where the keys of a tile lie, queries in, results out, partial results merged.
// Included once per instruction set, after simd.h.
#pragma once

#include <cmath>

#include "simd.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr float kLog2e = 1.4426950408889634f;

OCTAVO_INLINE int lesser(int a, int b) { return a < b ? a : b; }
OCTAVO_INLINE int larger(int a, int b) { return a > b ? a : b; }
OCTAVO_INLINE int padded(int n) { return (n + W - 1) / W * W; }

// The addresses of keys `first .. first + n - 1` of one head, and of their values. The last key is repeated, so that
// a kernel that takes several at once, or asks ahead for a whole tile, reads nothing that is not the sequence's own.
struct Keys {
  const char* k[kPairTile + 8];
  const char* v[kPairTile + 8];
  alignas(64) float k_scale[kKeyTile + 8];  // of quantised pages alone
  alignas(64) float v_scale[kKeyTile + 8];

  void find(const Pages& pages, const int32_t* table, int head, int first, int n, int tile = kKeyTile) {
    int t = 0;
    while (t < n) {
      int block = (first + t) / pages.block_tokens, inside = (first + t) % pages.block_tokens;
      int end = lesser(n, t + pages.block_tokens - inside);
      int64_t unit = table[block] * pages.unit_bytes;
      const char* key = pages.k + unit + head * pages.k_head_bytes + inside * pages.k_token_bytes;
      const char* value = pages.v + unit + head * pages.v_head_bytes + inside * pages.v_token_bytes;
      if (pages.k_scales) {
        int64_t at = unit + head * pages.scale_head_bytes + inside * pages.scale_token_bytes;
        for (int i = t; i < end; i++, at += pages.scale_token_bytes) {
          k_scale[i] = *reinterpret_cast<const float*>(pages.k_scales + at);
          v_scale[i] = *reinterpret_cast<const float*>(pages.v_scales + at);
        }
      }
      for (; t < end; t++) {
        k[t] = key;
        v[t] = value;
        key += pages.k_token_bytes;
        value += pages.v_token_bytes;
      }
    }
    for (; t < tile + 8; t++) {
      k[t] = k[n - 1];
      v[t] = v[n - 1];
      if (pages.k_scales) k_scale[t] = v_scale[t] = 0;
    }
  }
};

// Into the second-level cache: the first level has too few places for what is under way to keep memory busy.
OCTAVO_INLINE void prefetch(const char* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

template <class E>
OCTAVO_INLINE void widen(float* to, const char* from, int n, vf scale) {  // pads to whole vectors
  const typename E::T* p = reinterpret_cast<const typename E::T*>(from);
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, E::load(p + i) * scale);
  if (i < n) store(to + i, load_some<E>(p + i, n - i) * scale);
}

// A tile's keys and values as floats in one place, their scales applied to them if `scale` says so.
template <class E>
inline void widen_tile(const Pages& pages, Keys& keys, int count, float* k, float* v, bool scale) {
  const int k_width = padded(pages.k_dim), v_width = padded(pages.v_dim);
  const bool scaled = scale && quantised(pages.dtype);
  for (int t = 0; t < count; t++) {
    widen<E>(k + t * k_width, keys.k[t], pages.k_dim, splat(scaled ? keys.k_scale[t] : 1.0f));
    widen<E>(v + t * v_width, keys.v[t], pages.v_dim, splat(scaled ? keys.v_scale[t] : 1.0f));
  }
  for (int t = 0; t < count + 8; t++) {
    int source = lesser(t, count - 1);
    keys.k[t] = reinterpret_cast<const char*>(k + source * k_width);
    keys.v[t] = reinterpret_cast<const char*>(v + source * v_width);
  }
}

inline void widen_any(Dtype dtype, float* to, const char* from, int n, float scale) {
  if (dtype == Dtype::f32) widen<F32>(to, from, n, splat(scale));
  else if (dtype == Dtype::bf16) widen<BF16>(to, from, n, splat(scale));
  else widen<F16>(to, from, n, splat(scale));
}

template <class E>
OCTAVO_INLINE void narrow(char* to, const float* from, int n, vf scale) {
  typename E::T* p = reinterpret_cast<typename E::T*>(to);
  int i = 0;
  for (; i + W <= n; i += W) E::store(p + i, load(from + i) * scale);
  if (i < n) store_some<E>(p + i, load_some<F32>(from + i, n - i) * scale, n - i);
}

inline void narrow_any(Dtype dtype, char* to, const float* from, int n, float scale) {
  if (dtype == Dtype::f32) narrow<F32>(to, from, n, splat(scale));
  else if (dtype == Dtype::bf16) narrow<BF16>(to, from, n, splat(scale));
  else narrow<F16>(to, from, n, splat(scale));
}

// What a query is multiplied with, so that its product with a key is the exponent of two, or the argument of tanh.
inline float query_scale(const Call& c) { return c.softcap > 0 ? c.scale / c.softcap : c.scale * kLog2e; }

// to[i][j] = from(j)[i] for W vectors.
template <class From>
OCTAVO_INLINE void transpose(float* to, int stride, From from) {
#if defined(OCTAVO_AVX512)
  __m512 a[W], b[W];
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) a[i] = (__m512)from(i);
#pragma GCC unroll 16
  for (int i = 0; i < W; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < W; i += 4) {  // a[i + c] holds column c of every part of four rows
    a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    const __m512 *x = a + c, *y = a + 8 + c;
    __m512 low = _mm512_shuffle_f32x4(x[0], x[4], 0x44), high = _mm512_shuffle_f32x4(x[0], x[4], 0xee);
    __m512 low2 = _mm512_shuffle_f32x4(y[0], y[4], 0x44), high2 = _mm512_shuffle_f32x4(y[0], y[4], 0xee);
    store(to + c * stride, (vf)_mm512_shuffle_f32x4(low, low2, 0x88));
    store(to + (4 + c) * stride, (vf)_mm512_shuffle_f32x4(low, low2, 0xdd));
    store(to + (8 + c) * stride, (vf)_mm512_shuffle_f32x4(high, high2, 0x88));
    store(to + (12 + c) * stride, (vf)_mm512_shuffle_f32x4(high, high2, 0xdd));
  }
#else
  for (int j = 0; j < W; j++) {
    const vf row = from(j);
    for (int i = 0; i < W; i++) to[i * stride + j] = row[i];
  }
#endif
}

inline const char* query_row(const Call& c, const Item& it, int head, int row) {
  int64_t token = it.first + row / c.group, h = (int64_t)head * c.group + row % c.group;
  return c.q + (token * c.q_token + h * c.q_head) * size_of(c.dtype);
}

// out = values / total; the sink takes weight and gives no value.
inline void finish_row(const Call& c, const Item& it, int head, int row, float most, float total, const float* values) {
  int64_t token = it.first + row / c.group, h = (int64_t)head * c.group + row % c.group;
  float factor = 1.0f;
  if (c.sinks) {
    float sink = c.sinks[h] * kLog2e, top = sink > most ? sink : most;
    factor = std::exp2(most - top);
    total = total * factor + std::exp2(sink - top);
  }
  char* to = c.out + (token * c.out_token + h * c.out_head) * size_of(c.dtype);
  narrow_any(c.dtype, to, values, c.pages->v_dim, factor / total);
}

// One item's rows, either straight to the output or set aside until the last segment of its tile is there; whoever
// brings that one adds all of them, in order, so that the sum does not depend on who was first.
template <class Row>
inline void deliver(const Call& c, const Item& it, int head, Row row_of) {
  int rows = it.count * c.group, width = padded(c.pages->v_dim), heads = c.pages->kv_heads;
  if (it.segments == 1) {
    for (int r = 0; r < rows; r++) {
      float most, total;
      const float* values = row_of(r, most, total);
      finish_row(c, it, head, r, most, total, values);
    }
    return;
  }
  int64_t stride = width + 2, all = (int64_t)rows * stride;
  float* own = c.partials + (it.partial + (int64_t)head * rows) * stride;
  for (int r = 0; r < rows; r++) {
    float* p = own + r * stride;
    const float* values = row_of(r, p[0], p[1]);
    std::memcpy(p + 2, values, width * sizeof(float));
  }
  if (c.arrived[(int64_t)it.tile * heads + head].fetch_add(1, std::memory_order_acq_rel) + 1 < it.segments) return;
  const float* first = own - it.segment * all * heads;
  for (int r = 0; r < rows; r++) {
    float most = kNone, total = 0;
    for (int s = 0; s < it.segments; s++) {
      float m = first[s * all * heads + r * stride];
      most = m > most ? m : most;
    }
    alignas(64) float values[kMostDim + W];
    for (int i = 0; i < width; i += W) store(values + i, vf{});
    for (int s = 0; s < it.segments; s++) {
      const float* p = first + s * all * heads + r * stride;
      float factor = p[0] == kNone ? 0.0f : std::exp2(p[0] - most);
      total += factor * p[1];
      for (int i = 0; i < width; i += W) store(values + i, fma(load(p + 2 + i), splat(factor), load(values + i)));
    }
    finish_row(c, it, head, r, most, total, values);
  }
}

// values[row][dim] = values[row][dim] * decay[row] + sum over keys of weight[row][key] * v[key][dim], for R rows and
// N vectors of dims. Weight (r, t) is at weights[r * ROW + t * KEY].
template <class E, int R, int N, int ROW, int KEY, bool TAIL>
OCTAVO_INLINE void weigh(float* values, int width, const float* decay, const float* weights, const char* const* v,
                         int column, int keys, int last, const char* const* ahead, int ahead_bytes) {
  vf sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    vf by = splat(decay[r]);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[r][n] = load(values + r * width + column + n * W) * by;
  }
  for (int t = 0; t < keys; t++) {
    const typename E::T* p = reinterpret_cast<const typename E::T*>(v[t]) + column;
    if (ahead) prefetch(ahead[t], ahead_bytes);
    vf own[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) own[n] = TAIL && n == N - 1 ? load_some<E>(p + n * W, last) : E::load(p + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      vf weight = splat(weights[r * ROW + t * KEY]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[r][n] = fma(weight, own[n], sums[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(values + r * width + column + n * W, sums[r][n]);
}

constexpr int kColumns = W == 16 ? 4 : 2;  // vectors of dims that are summed together

template <class E, int R, int ROW, int KEY>
inline void weigh_all(float* values, int dims, const float* decay, const float* weights, const char* const* v, int keys,
                      const char* const* ahead, int ahead_bytes) {
  int width = padded(dims), last = dims % W, column = 0;
  for (; column + kColumns * W <= dims; column += kColumns * W) {
    weigh<E, R, kColumns, ROW, KEY, false>(values, width, decay, weights, v, column, keys, 0, ahead, ahead_bytes);
    ahead = nullptr;
  }
  for (; column + W <= dims; column += W) {
    weigh<E, R, 1, ROW, KEY, false>(values, width, decay, weights, v, column, keys, 0, ahead, ahead_bytes);
    ahead = nullptr;
  }
  if (last) weigh<E, R, 1, ROW, KEY, true>(values, width, decay, weights, v, column, keys, last, ahead, ahead_bytes);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
