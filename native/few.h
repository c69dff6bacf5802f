// Attention of a few query rows (a decode: the heads of one group): keys are read in place, once for all rows.
// Scores have the keys in the lanes: scores[row][key].
// Chunks whose tables begin with the same blocks are taken together that far: a tile of keys is brought to the cache
// once for the rows of all. What is added up for a row, and in which order, does not depend on who is beside it.
#pragma once

#include <type_traits>

#include "few_pairs.h"
#include "few_side.h"
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

// Pairs of bfloat16 go by other ways from here on; only AVX-512 has them.
template <class E, int R>
OCTAVO_INLINE void dot_tile(float* scores, const float* q, int q_width, const char* const* k, int dim) {
#if defined(OCTAVO_AVX512)
  if constexpr (std::is_same<E, Pairs>::value) return dot_of_pairs<R>(scores, q, q_width, k, dim);
  else
#endif
    dot<E, R>(scores, q, q_width, k, dim);
}

template <class E, int R>
OCTAVO_INLINE void weigh_tile(float* values, int dims, const float* decay, const float* weights, const char* const* v,
                              int keys, const char* const* ahead, int ahead_bytes) {
#if defined(OCTAVO_AVX512)
  if constexpr (std::is_same<E, Pairs>::value)
    return weigh_all_woven<R>(values, dims, decay, weights, v, keys, ahead, ahead_bytes);
  else
#endif
    weigh_all<E, R, kKeyTile, 1>(values, dims, decay, weights, v, keys, ahead, ahead_bytes);
}

constexpr int kDotRows = W == 16 ? 3 : 2;
constexpr int kWeighRows = 4;

// f(number of rows as a constant, first row) over all rows, at most N at a time.
template <int N>
struct Rows {
  static constexpr int count = N;
};
template <int N, class F>
OCTAVO_INLINE void with_rows(int now, int first, F& f) {
  if constexpr (N > 1) {
    if (now < N) return with_rows<N - 1>(now, first, f);
  }
  f(Rows<N>(), first);
}
template <int N, class F>
OCTAVO_INLINE void by_rows(int from, int to, F f) {
  while (from < to) {
    const int left = to - from, now = left > N && left < 2 * N ? (left + 1) / 2 : lesser(left, N);
    with_rows<N>(now, from, f);
    from += now;
  }
}

// Scores of R rows and a tile become weights: the running maximum and the totals (still one for each lane) move on, the
// decay of what was summed before comes back. With MASK, keys outside low .. high - 1 of the tile are hidden. The
// scales of quantised keys and values are applied here, once for a row of scores. With PAIRS, scores are still to be
// multiplied by `scale`, and weights become bfloat16.
template <int R, bool MASK, bool PAIRS>
OCTAVO_INLINE void soften(float* scores, const Keys* scaled, float scale, const int* low, const int* high, int count,
                          float cap, float* most, float* total, float* decay) {
  const int end = padded(count);
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  vf top[R], base[R], sums[R] = {};
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) top[r] = splat(most[r]);
  for (int t = 0; t < end; t += W) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      vf s = load(scores + r * kKeyTile + t);
      if (PAIRS) s *= splat(scale);
      if (scaled) s *= load(scaled->k_scale + t);
      if (cap > 0) s = tanh(s) * splat(cap * kLog2e);
      if (MASK) {
        vi at = lane + t;
        s = where((at >= splat(low[r])) & (at < splat(high[r])), s, splat(kNone));
      }
      top[r] = greater(s, top[r]);
      if (PAIRS || MASK || scaled || cap > 0) store(scores + r * kKeyTile + t, s);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    const float now = largest(top[r]);
    base[r] = splat(now == kNone ? 0.0f : now);
    const vf by = exp2(splat(most[r]) - base[r]);  // of a row that saw nothing yet: there is nothing to decay
    most[r] = now;
    decay[r] = by[0];
    sums[r] = load(total + r * W) * by;
  }
  for (int t = 0; t < end; t += W) {
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      vf s = load(scores + r * kKeyTile + t), p = PAIRS ? exp2_short(s - base[r]) : exp2(s - base[r]);
      if (MASK) p = where(s == splat(kNone), vf{}, p);
      sums[r] += p;
      if (PAIRS) store_rounded(scores + r * kKeyTile + t / 2, p);
      else store(scores + r * kKeyTile + t, scaled ? p * load(scaled->v_scale + t) : p);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) store(total + r * W, sums[r]);
}

struct Few {
  int rows, q_width, width;
  float* q;       // [rows][q_width]
  float* scores;  // [rows][kKeyTile]
  float* values;  // [rows][width]
  float* total;   // [rows][W]
  float *most, *decay;
  float* k;  // a tile in floats, where pages are not and there are more than kFewRows
  float* v;
  float* side;  // what few_side.h needs, with kSideRows or more
  const Item* items;
  int each;  // rows of an item

  static size_t floats(const Call& c, int rows) {
    const size_t k = padded(c.pages->k_dim), v = padded(c.pages->v_dim);
    size_t own = rows * (k + v + kKeyTile + W + 2) + 2 * W;
    if (rows > kFewRows) own += (kKeyTile + 8) * (k + v);
#if defined(OCTAVO_AVX512)
    if (rows >= kSideRows) own += Side::floats(*c.pages);
#endif
    return own;
  }
  Few(const Call& c, const Item* items_, int count, float* p)
      : rows(count * items_->count * c.group), q_width(padded(c.pages->k_dim)), width(padded(c.pages->v_dim)),
        items(items_), each(items_->count * c.group) {
    q = p, p += rows * q_width;
    scores = p, p += rows * kKeyTile;
    values = p, p += rows * width;
    total = p, p += rows * W;
    most = p, p += padded(rows);
    decay = p, p += padded(rows);
    k = p, p += rows > kFewRows ? (kKeyTile + 8) * q_width : 0;
    v = p, p += rows > kFewRows ? (kKeyTile + 8) * width : 0;
    side = p;
  }
};

// Rows from .. to - 1 over one tile; of the next, values are asked for while this one's scores are made, and keys while
// its values are summed.
template <class E>
inline void attend_tile(const Call& c, const Few& few, int from, int to, const Keys& keys, const Keys* scaled,
                        int first, int count, const Keys* coming) {
  constexpr bool kPairs = std::is_same<E, Pairs>::value;
  const Pages& pages = *c.pages;
  const float scale = query_scale(c);
  const int k_bytes = pages.k_dim * size_of(pages.dtype), v_bytes = pages.v_dim * size_of(pages.dtype);
  by_rows<kDotRows>(from, to, [&](auto n, int r) {
    constexpr int R = decltype(n)::count;
    float *scores = few.scores + r * kKeyTile, *most = few.most + r, *total = few.total + r * W, *decay = few.decay + r;
    int low[R], high[R];
    bool mask = count % W != 0;
    for (int t = 0; t < count; t += kBlock) {
      for (int i = 0; coming && r == from && i < kBlock; i++) prefetch(coming->v[t + i], v_bytes);
      dot_tile<E, R>(scores + t, few.q + r * few.q_width, few.q_width, keys.k + t, pages.k_dim);
    }
    for (int i = 0; i < R; i++) {
      const int p = few.items[(r + i) / few.each].position + (r + i) % few.each / c.group;
      low[i] = larger(0, c.sight.first_key(p) - first);
      high[i] = lesser(count, p + 1 - first);
      mask = mask || low[i] > 0 || high[i] < count;
    }
    if (mask) soften<R, true, kPairs>(scores, scaled, scale, low, high, count, c.softcap, most, total, decay);
    else soften<R, false, kPairs>(scores, scaled, scale, low, high, count, c.softcap, most, total, decay);
  });
  by_rows<kWeighRows>(from, to, [&](auto n, int r) {
    weigh_tile<E, decltype(n)::count>(few.values + r * few.width, pages.v_dim, few.decay + r,
                                      few.scores + r * kKeyTile, keys.v, count,
                                      coming && r == from ? coming->k : nullptr, k_bytes);
  });
}

// step(keys of a tile, first key, how many, the next tile or null) over keys low .. high - 1 of a table.
template <class F>
OCTAVO_INLINE void by_key_tiles(const Pages& pages, const int32_t* table, int head, int low, int high, F step) {
  Keys tiles[2];
  int count = lesser(kKeyTile, high - low), turn = 0;
  if (count > 0) tiles[0].find(pages, table, head, low, count);
  const int size = static_cast<int>(size_of(pages.dtype));
  for (int t = 0; t < count; t++) prefetch(tiles[0].k[t], pages.k_dim * size);
  for (int t = 0; t < count; t++) prefetch(tiles[0].v[t], pages.v_dim * size);
  for (int first = low; first < high; turn ^= 1) {
    const int next = first + count, next_count = lesser(kKeyTile, high - next);
    if (next_count > 0) tiles[turn ^ 1].find(pages, table, head, next, next_count);
    step(tiles[turn], first, count, next_count > 0 ? &tiles[turn ^ 1] : nullptr);
    first = next;
    count = next_count;
  }
}

// Rows from .. to - 1 over keys low .. high - 1 of a table; `WIDE` makes floats of a tile first.
template <class E, bool WIDE>
inline void attend_span(const Call& c, const Few& few, int from, int to, const int32_t* table, int head, int low,
                        int high) {
  const Pages& pages = *c.pages;
  by_key_tiles(pages, table, head, low, high, [&](Keys& keys, int first, int count, const Keys* coming) {
    const Keys* scaled = quantised(pages.dtype) ? &keys : nullptr;
    if constexpr (WIDE) {
      widen_tile<E>(pages, keys, count, few.k, few.v, false);
      attend_tile<F32>(c, few, from, to, keys, scaled, first, count, coming);
    } else {
      attend_tile<E>(c, few, from, to, keys, scaled, first, count, coming);
    }
  });
}

#if defined(OCTAVO_AVX512)

// One tile of keys that all rows share, as attend_tile.
template <class E>
inline void attend_side_tile(const Call& c, const Few& few, const Side& side, const Keys& keys, const Keys* scaled,
                             int first, const Keys* coming) {
  constexpr bool kPairs = std::is_same<E, Pairs>::value;
  const Pages& pages = *c.pages;
  const int k_bytes = pages.k_dim * size_of(pages.dtype), v_bytes = pages.v_dim * size_of(pages.dtype);
  const bool mask = side.last_low > first || side.first_high < first + kKeyTile;
  for (int n = 0; n < few.rows; n += W) {
    for (int t = n * 2; coming && t < lesser(kKeyTile, (n + W) * 2); t++) prefetch(coming->v[t], v_bytes);
    side_scores<E>(side.scores + n, side.q + n * side.words, keys.k, side.words);
    if (mask) side_soften<kPairs, true>(side, n, scaled, query_scale(c), first, c.softcap, few.most, few.decay);
    else side_soften<kPairs, false>(side, n, scaled, query_scale(c), first, c.softcap, few.most, few.decay);
  }
  if (kPairs) weave(side.values, keys, pages.v_dim);
  by_rows<kWeighRows>(0, few.rows, [&](auto n, int r) {
    constexpr int R = decltype(n)::count;
    for (int t = r * 2; coming && t < lesser(kKeyTile, (r + R) * 2); t++) prefetch(coming->k[t], k_bytes);
    float *values = few.values + r * few.width, *decay = few.decay + r;
    if constexpr (kPairs) {
      const float* weights = side.weights + r;
      int d = 0;
      for (; d + 4 * W <= few.width; d += 4 * W)
        weigh_pairs<R, 4, kSide>(values + d, few.width, decay, weights, side.values + d, kKeyTile / 2);
      for (; d < few.width; d += 2 * W)
        weigh_pairs<R, 2, kSide>(values + d, few.width, decay, weights, side.values + d, kKeyTile / 2);
    } else {
      weigh_all<F32, R, 1, kSide>(values, pages.v_dim, decay, side.scores + r, keys.v, kKeyTile, nullptr, 0);
    }
  });
}

// All rows side by side over keys that they share, whole tiles of them.
template <class E, bool WIDE>
inline void attend_side(const Call& c, const Few& few, const int32_t* table, int head, int low, int high) {
  const Pages& pages = *c.pages;
  Side side(pages, std::is_same<E, Pairs>::value ? pages.k_dim / 2 : padded(pages.k_dim), few.side);
  for (int r = 0; r < padded(few.rows); r++) {  // those behind the last are like it
    const int of = lesser(r, few.rows - 1), p = few.items[of / few.each].position + of % few.each / c.group;
    side.low[r] = c.sight.first_key(p);
    side.high[r] = p + 1;
    side.last_low = larger(side.last_low, side.low[r]);
    side.first_high = lesser(side.first_high, side.high[r]);
    few.most[r] = few.most[of];
  }
  for (int n = 0; n < few.rows; n += W)
    for (int d = 0; d < side.words; d += W)
      transpose(side.q + n * side.words + d * W, W,
           [&](int i) { return load(few.q + lesser(n + i, few.rows - 1) * few.q_width + d); });
  by_key_tiles(pages, table, head, low, high, [&](Keys& keys, int first, int count, const Keys* coming) {
    const Keys* scaled = quantised(pages.dtype) ? &keys : nullptr;
    if constexpr (WIDE) {
      widen_tile<E>(pages, keys, count, few.k, few.v, false);
      attend_side_tile<F32>(c, few, side, keys, scaled, first, coming);
    } else {
      attend_side_tile<E>(c, few, side, keys, scaled, first, coming);
    }
  });
  for (int n = 0; n < few.rows; n += W) {
    alignas(64) float turned[W * W];
    transpose(turned, W, [&](int i) { return load(side.total + i * kSide + n); });
    std::memcpy(few.total + n * W, turned, sizeof(float) * W * lesser(W, few.rows - n));
  }
}

#endif

// Keys from `low` to `high`, which the rows of all items share.
template <class E, bool WIDE>
inline void attend_shared(const Call& c, const Few& few, int head, int low, int high) {
#if defined(OCTAVO_AVX512)
  const bool whole = WIDE || c.pages->k_dim % W == 0;
  if (few.rows >= kSideRows && whole) return attend_side<E, WIDE>(c, few, few.items->table, head, low, high);
#endif
  attend_span<E, WIDE>(c, few, 0, few.rows, few.items->table, head, low, high);
}

template <class E>
inline void load_few(const Call& c, const Few& few, int head) {
  for (int r = 0; r < few.rows; r++) {
    float* q = few.q + r * few.q_width;
    const char* row = query_row(c, few.items[r / few.each], head, r % few.each);
    if (std::is_same<E, Pairs>::value) std::memcpy(q, row, c.pages->k_dim * sizeof(uint16_t));
    else widen_any(c.dtype, q, row, c.pages->k_dim, query_scale(c));
    few.most[r] = kNone;
    store(few.total + r * W, vf{});
  }
  std::memset(few.values, 0, sizeof(float) * few.rows * few.width);
}

template <class E>
inline void attend_few(const Call& c, const Item* items, const Task& task, int head, float* scratch) {
  const Few few(c, items, task.count, scratch);
  load_few<E>(c, few, head);
  if (task.count == 1) {
    attend_span<E, false>(c, few, 0, few.rows, items->table, head, items->key_lo, items->key_hi);
  } else {
    constexpr bool kInPlace = sizeof(typename E::T) == 4 || std::is_same<E, Pairs>::value;
    if (kInPlace || few.rows <= kFewRows) attend_shared<E, false>(c, few, head, items->key_lo, task.together);
    else attend_shared<E, !kInPlace>(c, few, head, items->key_lo, task.together);
    for (int i = 0; i < task.count; i++)
      attend_span<E, false>(c, few, i * few.each, (i + 1) * few.each, items[i].table, head, task.together,
                            items[i].key_hi);
  }
#if defined(OCTAVO_AVX512)
  if (std::is_same<E, Pairs>::value) unwoven(few.values, few.rows * few.width);
#endif
  for (int i = 0; i < task.count; i++)
    deliver(c, items[i], head, [&](int r, float& most, float& total) {
      r += i * few.each;
      most = few.most[r];
      total = sum(load(few.total + r * W));
      return few.values + r * few.width;
    });
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
