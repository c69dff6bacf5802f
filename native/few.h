// Attention of a few query rows (a decode: the heads of one group): keys are read in place, once for all rows.
// Scores have the keys in the lanes: scores[row][key].
#pragma once

#include "rows.h"

namespace octavo {
namespace OCTAVO_ISA {

// kBlock keys times R rows; the key is loaded once for all of them.
template <class E, int R>
OCTAVO_INLINE void dot(float* scores, const float* q, int q_width, const char* const* k, int dim) {
  vf sums[R][kBlock] = {};
  int d = 0;
  for (; d + W <= dim; d += W) {
    vf row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) row[r] = load(q + r * q_width + d);
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; i++) {
      vf key = E::load(reinterpret_cast<const typename E::T*>(k[i]) + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][i] = fma(row[r], key, sums[r][i]);
    }
  }
  if (d < dim) {
#pragma GCC unroll 8
    for (int i = 0; i < kBlock; i++) {
      vf key = load_some<E>(reinterpret_cast<const typename E::T*>(k[i]) + d, dim - d);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sums[r][i] = fma(load(q + r * q_width + d), key, sums[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) store_sums(scores + r * kKeyTile, sums[r]);
}

constexpr int kDotRows = W == 16 ? 3 : 2;

template <class E>
inline void dot_rows(float* scores, const float* q, int q_width, const char* const* k, int dim, int rows) {
  while (rows > 0) {
    int now = rows == 4 && kDotRows == 3 ? 2 : lesser(rows, kDotRows);
    if (now == 1) dot<E, 1>(scores, q, q_width, k, dim);
    else if (now == 2) dot<E, 2>(scores, q, q_width, k, dim);
    else dot<E, kDotRows>(scores, q, q_width, k, dim);
    scores += now * kKeyTile;
    q += now * q_width;
    rows -= now;
  }
}

template <class E, int R>
inline void weigh_few(float* values, int dims, const float* decay, const float* weights, const char* const* v, int keys,
                      const char* const* ahead, int ahead_bytes) {
  weigh_all<E, R, kKeyTile, 1>(values, dims, decay, weights, v, keys, ahead, ahead_bytes);
}

// One row of scores of a tile becomes weights: the running maximum and total move on, the decay of what was summed
// before comes back. Keys outside low .. high - 1 of the tile are hidden. The scales of quantised keys and values
// are applied here, once for a row of scores.
inline float soften(float* scores, const Keys* scaled, int low, int high, int count, float cap, float& most,
                    float& total) {
  int end = padded(count);
  vf top = splat(most);
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  for (int t = 0; t < end; t += W) {
    vf s = load(scores + t);
    if (scaled) s *= load(scaled->k_scale + t);
    if (cap > 0) s = tanh(s) * splat(cap * kLog2e);
    if (t < low || t + W > high) {
      vi at = lane + t;
      s = where((at >= splat(low)) & (at < splat(high)), s, splat(kNone));
    }
    top = greater(s, top);
    store(scores + t, s);
  }
  float now = largest(top), base = now == kNone ? 0.0f : now;
  vf sums = vf{};
  for (int t = 0; t < end; t += W) {
    vf s = load(scores + t);
    vf p = exp2(s - splat(base));
    if (t < low || t + W > high) p = where(s == splat(kNone), vf{}, p);
    sums += p;
    store(scores + t, scaled ? p * load(scaled->v_scale + t) : p);
  }
  float decay = most == kNone ? 0.0f : std::exp2(most - base);
  most = now;
  total = total * decay + sum(sums);
  return decay;
}

inline size_t few_scratch(const Call& c) {
  return kFewRows * (padded(c.pages->k_dim) + padded(c.pages->v_dim) + kKeyTile + W);
}

template <class E>
inline void attend_few(const Call& c, const Item& it, int head, float* scratch) {
  const Pages& pages = *c.pages;
  const int rows = it.count * c.group, q_width = padded(pages.k_dim), width = padded(pages.v_dim);
  const int k_bytes = pages.k_dim * sizeof(typename E::T), v_bytes = pages.v_dim * sizeof(typename E::T);
  float* q = scratch;
  float* scores = q + kFewRows * q_width;
  float* values = scores + kFewRows * kKeyTile;
  float most[kFewRows], total[kFewRows], decay[kFewRows];
  for (int r = 0; r < rows; r++) {
    widen_any(c.dtype, q + r * q_width, query_row(c, it, head, r), pages.k_dim, query_scale(c));
    most[r] = kNone;
    total[r] = 0;
  }
  std::memset(values, 0, sizeof(float) * rows * width);
  Keys tiles[2];
  int count = lesser(kKeyTile, it.key_hi - it.key_lo), turn = 0;
  tiles[0].find(pages, it.table, head, it.key_lo, count);
  for (int first = it.key_lo; first < it.key_hi; turn ^= 1) {
    const Keys& keys = tiles[turn];
    // The next tile's values are asked for while this one's scores are made, its keys while this one's are summed.
    const int next = first + count, next_count = lesser(kKeyTile, it.key_hi - next);
    if (next_count > 0) tiles[turn ^ 1].find(pages, it.table, head, next, next_count);
    const Keys* coming = next_count == count ? &tiles[turn ^ 1] : nullptr;
    for (int t = 0; t < count; t += kBlock) {
      for (int i = 0; coming && i < kBlock; i++) prefetch(coming->v[t + i], v_bytes);
      dot_rows<E>(scores + t, q, q_width, keys.k + t, pages.k_dim, rows);
    }
    for (int r = 0; r < rows; r++) {
      int p = it.position + r / c.group;
      decay[r] = soften(scores + r * kKeyTile, quantised(pages.dtype) ? &keys : nullptr,
                        larger(0, c.sight.first_key(p) - first), lesser(count, p + 1 - first), count, c.softcap,
                        most[r], total[r]);
    }
    const char* const* ahead = coming ? coming->k : nullptr;
    for (int r = 0; r < rows;) {
      int left = rows - r;
      float* to = values + r * width;
      const float* p = scores + r * kKeyTile;
      if (left >= 4) weigh_few<E, 4>(to, pages.v_dim, decay + r, p, keys.v, count, ahead, k_bytes), r += 4;
      else if (left == 3) weigh_few<E, 3>(to, pages.v_dim, decay + r, p, keys.v, count, ahead, k_bytes), r += 3;
      else if (left == 2) weigh_few<E, 2>(to, pages.v_dim, decay + r, p, keys.v, count, ahead, k_bytes), r += 2;
      else weigh_few<E, 1>(to, pages.v_dim, decay + r, p, keys.v, count, ahead, k_bytes), r += 1;
      ahead = nullptr;
    }
    first = next;
    count = next_count;
  }
  deliver(c, it, head, [&](int r, float& m, float& l) {
    m = most[r];
    l = total[r];
    return values + r * width;
  });
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
