// What few.h does with keys and values of bfloat16 where queries are too and the processor has dots of its pairs.
// Both are read in place. The rows of two values are woven into pairs of keys as they come, which leaves the sums of
// 32 dims in the order in which the instruction weaves: `unwoven` puts them right at the end.
#pragma once

#include "rows.h"

namespace octavo {
namespace OCTAVO_ISA {

struct Pairs {
  using T = uint16_t;
};
constexpr int kWoven = 32;  // dims; of keys and of values, so many must go without a rest

#if defined(OCTAVO_AVX512)

template <int R>
OCTAVO_INLINE void dot_of_pairs(float* scores, const float* q, int q_width, const char* const* k, int dim) {
  vf sums[R][kBlock] = {};
  for (int d = 0; d < dim; d += kWoven) {
    vf row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) row[r] = load(q + r * q_width + d / 2);
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; i++) {
      vf key = load(reinterpret_cast<const float*>(k[i] + d * 2));
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][i] = dot_pairs(row[r], key, sums[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) store_sums(scores + r * kKeyTile, sums[r]);
}

// As weigh() in rows.h; weights are bfloat16, a row of them where a row of scores was.
template <int R, int N>
OCTAVO_INLINE void weigh_woven(float* values, int width, const float* decay, const float* weights, const char* const* v,
                               int column, int keys, const char* const* ahead, int ahead_bytes) {
  vf sums[R][2 * N];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < 2 * N; n++) sums[r][n] = load(values + r * width + column + n * W) * splat(decay[r]);
  for (int t = 0; t < keys; t += 2) {
    if (ahead) prefetch(ahead[t], ahead_bytes), prefetch(ahead[t + 1], ahead_bytes);
#pragma GCC unroll 2
    for (int n = 0; n < N; n++) {
      const int at = (column + n * kWoven) * 2;
      __m512i a = _mm512_loadu_si512(v[t] + at), b = _mm512_loadu_si512(v[t + 1] + at);
      vf low = (vf)_mm512_unpacklo_epi16(a, b), high = (vf)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        vf weight = splat_pair(weights + r * kKeyTile + t / 2);
        sums[r][2 * n] = dot_pairs(weight, low, sums[r][2 * n]);
        sums[r][2 * n + 1] = dot_pairs(weight, high, sums[r][2 * n + 1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < 2 * N; n++) store(values + r * width + column + n * W, sums[r][n]);
}

template <int R>
inline void weigh_all_woven(float* values, int dims, const float* decay, const float* weights, const char* const* v,
                            int keys, const char* const* ahead, int ahead_bytes) {
  int column = 0;
  for (; column + 2 * kWoven <= dims; column += 2 * kWoven) {
    weigh_woven<R, 2>(values, dims, decay, weights, v, column, keys, ahead, ahead_bytes);
    ahead = nullptr;
  }
  if (column < dims) weigh_woven<R, 1>(values, dims, decay, weights, v, column, keys, ahead, ahead_bytes);
}

inline void unwoven(float* values, int dims) {
  for (; dims > 0; dims -= kWoven, values += kWoven) {
    float woven[kWoven];
    std::memcpy(woven, values, sizeof(woven));
    for (int i = 0; i < kWoven; i += 4) std::memcpy(values + i, woven + i / 8 * 4 + i % 8 * 4, 16);
  }
}

#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
