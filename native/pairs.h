// Attention of many query rows where queries and pages are bfloat16 and the processor has dots of its pairs: products
// are exact and added in float32 as in many.h, weights are rounded to bfloat16 before they meet the values. Queries lie
// as pairs of dims, weights and values as pairs of keys; keys are read in place.
#pragma once

#include "many.h"

#if defined(OCTAVO_AVX512)

namespace octavo {
namespace OCTAVO_ISA {

// scores[t][row] of `keys` keys for N vectors of rows, and the largest of each row; q is [dim / 2][kRows] pairs, K keys
// at a time: behind the last, those that follow it.
template <int N, int K>
OCTAVO_INLINE void score_pairs(float* scores, float* most, const float* q, const char* const* k, int dim, int keys) {
  vf top[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) top[n] = splat(kNone);
  for (int t = 0; t < keys; t += K) {
    vf sums[K][N] = {};
    for (int d = 0; d < dim / 2; d++) {
      vf row[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) row[n] = load(q + d * kRows + n * W);
#pragma GCC unroll 8
      for (int i = 0; i < K; i++) {
        vf key = splat_pair(k[t + i] + d * 4);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sums[i][n] = dot_pairs(key, row[n], sums[i][n]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < K; i++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        store(scores + (t + i) * kRows + n * W, sums[i][n]);
        top[n] = greater(sums[i][n], top[n]);
      }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) store(most + n * W, top[n]);
}

constexpr int kPairKeys = 8;  // a multiple of how many keys any number of vectors takes at a time

inline void score_pair_rows(float* scores, float* most, const float* q, const char* const* k, int dim, int keys,
                            int vectors) {
  if (vectors == 1) score_pairs<1, 8>(scores, most, q, k, dim, keys);
  else if (vectors == 2) score_pairs<2, 8>(scores, most, q, k, dim, keys);
  else if (vectors == 3) score_pairs<3, 4>(scores, most, q, k, dim, keys);
  else score_pairs<4, 4>(scores, most, q, k, dim, keys);
}

// What scores need before they are weights, where some keys are hidden or a cap bends them: they are scaled, and the
// largest of each row is found anew. For one vector of rows.
template <bool CAP>
OCTAVO_INLINE void settle_pairs(float* scores, float* most, const State& s, int n, int first, int keys, float scale,
                                float cap) {
  const vi low = load(s.low + n), high = load(s.high + n);
  vf top = splat(kNone);
  for (int t = 0; t < keys; t++) {
    vf x = load(scores + t * kRows + n) * splat(scale);
    if (CAP) x = tanh(x) * splat(cap);
    const vi at = splat(first + t);
    x = where((at >= low) & (at < high), x, splat(kNone));
    top = greater(x, top);
    store(scores + t * kRows + n, x);
  }
  store(most + n, top);
}

// An even number of scores, of which `most` are the largest, become weights: those of two keys two bfloat16 in one
// place, [key / 2][row].
inline void soften_pairs(float* scores, const float* most, State& s, int n, int keys, float scale) {
  const vf before = load(s.most + n), now = greater(load(most + n) * splat(scale), before);
  const vf base = where(now == splat(kNone), vf{}, now);
  vf sums = {};
  for (int t = 0; t < keys; t += 2) {
    const vf even = exp2_short(load(scores + t * kRows + n) * splat(scale) - base);
    const vf odd = exp2_short(load(scores + (t + 1) * kRows + n) * splat(scale) - base);
    sums += even;
    sums += odd;
    store(scores + t / 2 * kRows + n, pair(even, odd));
  }
  const vf decay = exp2(before - base);
  store(s.decay + n, decay);
  store(s.total + n, fma(load(s.total + n), decay, sums));
  store(s.most + n, now);
}

// Values of a tile become pairs [key / 2][width]; an odd last key is paired with itself.
inline void pair_values(float* to, const Keys& keys, int count, int dims, int width) {
  for (int t = 0; t < count; t += 2, to += width) {
    const uint16_t* a = reinterpret_cast<const uint16_t*>(keys.v[t]);
    const uint16_t* b = reinterpret_cast<const uint16_t*>(keys.v[t + 1]);
    int d = 0;
    for (; d + W <= dims; d += W) store(to + d, (vf)((vu)BF16::load(a + d) >> 16 | (vu)BF16::load(b + d)));
    if (d < dims)
      store(to + d, (vf)((vu)load_some<BF16>(a + d, dims - d) >> 16 | (vu)load_some<BF16>(b + d, dims - d)));
  }
}

// values[row][dim] of R rows and N vectors of dims, as weigh() in rows.h; weights of pair t are at weights[t * KEY].
template <int R, int N, int KEY = kRows>
OCTAVO_INLINE void weigh_pairs(float* values, int width, const float* decay, const float* weights, const float* v,
                               int pairs) {
  vf sums[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[r][n] = load(values + r * width + n * W) * splat(decay[r]);
  for (int t = 0; t < pairs; t++) {
    vf own[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) own[n] = load(v + t * width + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      vf weight = splat_pair(weights + t * KEY + r);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[r][n] = dot_pairs(weight, own[n], sums[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(values + r * width + n * W, sums[r][n]);
}

inline void load_query_pairs(const Call& c, const Item& it, int head, const Many& m) {
  turn_queries(c, it, head, m, c.pages->k_dim / 2, [&](const char* row, int d, int n) {
    const float* p = reinterpret_cast<const float*>(row) + d;
    return n == W ? load(p) : load_some<F32>(p, n);
  });
}

inline void attend_pairs(const Call& c, const Item& it, int head, float* scratch) {
  const Pages& pages = *c.pages;
  const int rows = it.count * c.group;
  const Many m(c, rows, scratch);
  const float scale = query_scale(c);
  load_query_pairs(c, it, head, m);
  begin_rows(c, it, m);
  by_tiles<kPairTile>(pages, it, head, [&](const Keys& keys, int first, int count, Ahead& ahead) {
    pair_values(m.v, keys, count, pages.v_dim, m.width);
    for (int g = 0; g < m.groups; g++) {
      State& s = m.states[g];
      const int low = larger(first, s.low[0]) - first, high = lesser(first + count, s.high[kRows - 1]) - first;
      const int a = low / 2 * 2, b = (high + 1) / 2 * 2;
      if (low >= high) continue;
      const int vectors = lesser(kVectors, (rows - g * kRows + W - 1) / W);
      const bool hidden = s.low[kRows - 1] > first + a || s.high[0] < first + b || (b - a) % kPairKeys != 0;
      const bool plain = !hidden && c.softcap == 0 && scale >= 0;
      alignas(64) float most[kRows];
      score_pair_rows(m.scores, most, m.q + (size_t)g * pages.k_dim * kRows, keys.k + a, pages.k_dim, b - a, vectors);
      for (int n = 0; n < vectors * W; n += W) {
        if (c.softcap > 0) settle_pairs<true>(m.scores, most, s, n, first + a, b - a, scale, c.softcap * kLog2e);
        else if (!plain) settle_pairs<false>(m.scores, most, s, n, first + a, b - a, scale, 0);
        soften_pairs(m.scores, most, s, n, b - a, plain ? scale : 1.0f);
      }
      for (int r = 0; r < vectors * W; r += 4) {
        ahead.ask();
        float* values = m.values + (size_t)(g * kRows + r) * m.width;
        const float* v = m.v + a / 2 * m.width;
        int d = 0;
        for (; d + 4 * W <= m.width; d += 4 * W)
          weigh_pairs<4, 4>(values + d, m.width, s.decay + r, m.scores + r, v + d, (b - a) / 2);
        for (; d < m.width; d += W)
          weigh_pairs<4, 1>(values + d, m.width, s.decay + r, m.scores + r, v + d, (b - a) / 2);
      }
    }
  });
  deliver_rows(c, it, head, m);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo

#endif
