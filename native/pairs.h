// Attention of many query rows where queries and pages are bfloat16 and the processor has dots of its pairs: products
// are exact and added in float32 as in many.h, weights are rounded to bfloat16 before they meet the values. Queries lie
// as pairs of dims, weights and values as pairs of keys; keys are read in place.
#pragma once

#include "many.h"

#if defined(OCTAVO_AVX512)

namespace octavo {
namespace OCTAVO_ISA {

// scores[t][row] of `keys` keys for N vectors of rows; q is [dim / 2][kRows] pairs, K keys at a time.
template <int N, int K>
OCTAVO_INLINE void score_pairs(float* scores, const float* q, const char* const* k, int dim, int keys, float scale) {
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
      for (int n = 0; n < N; n++) store(scores + (t + i) * kRows + n * W, sums[i][n] * splat(scale));
  }
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
  const int rows = it.count * c.group, dim = c.pages->k_dim;
  for (int r = 0; r < m.groups * kRows; r++) {
    const char* row = query_row(c, it, head, lesser(r, rows - 1));
    float* q = m.q + (size_t)(r / kRows) * dim * kRows + r % kRows;
    for (int d = 0; d < dim / 2; d++) std::memcpy(q + d * kRows, row + d * 4, 4);
  }
}

inline void attend_pairs(const Call& c, const Item& it, int head, float* scratch) {
  const Pages& pages = *c.pages;
  const int rows = it.count * c.group;
  const Many m(c, rows, scratch);
  load_query_pairs(c, it, head, m);
  begin_rows(c, it, m);
  by_tiles(pages, it, head, [&](const Keys& keys, int first, int count, Ahead& ahead) {
    pair_values(m.v, keys, count, pages.v_dim, m.width);
    for (int g = 0; g < m.groups; g++) {
      State& s = m.states[g];
      const int low = larger(first, s.low[0]) - first, high = lesser(first + count, s.high[kRows - 1]) - first;
      const int a = low / 2 * 2, b = (high + 1) / 2 * 2;
      if (low >= high) continue;
      const int vectors = lesser(kVectors, (rows - g * kRows + W - 1) / W);
      const bool mask = s.low[kRows - 1] > first + a || s.high[0] < first + b;
      const float* q = m.q + (size_t)g * pages.k_dim * kRows;
      if (vectors == 1) score_pairs<1, 8>(m.scores, q, keys.k + a, pages.k_dim, b - a, query_scale(c));
      else if (vectors == 2) score_pairs<2, 8>(m.scores, q, keys.k + a, pages.k_dim, b - a, query_scale(c));
      else if (vectors == 3) score_pairs<3, 4>(m.scores, q, keys.k + a, pages.k_dim, b - a, query_scale(c));
      else score_pairs<4, 6>(m.scores, q, keys.k + a, pages.k_dim, b - a, query_scale(c));
      soften_rows<true>(m.scores, s, vectors, first + a, b - a, mask, c.softcap);
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
