// Attention of many query rows (a chunk: positions x heads of a group), in groups of a few vectors of rows.
// Scores have the rows in the lanes, scores[key][row]: queries are transposed once, keys never, and the softmax
// needs no sum across lanes. Rows are ordered by position, so a group of rows sees nearly the same keys.
#pragma once

#include "rows.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kVectors = W == 16 ? 4 : 2;  // vectors of rows in a group
constexpr int kRows = kVectors * W;

// scores[t][row] of `keys` keys for N vectors of rows; q is [dim][kRows], K keys at a time.
template <int N, int K>
OCTAVO_INLINE void score(float* scores, const float* q, const char* const* k, int dim, int keys) {
  for (int t = 0; t < keys; t += K) {
    vf sums[K][N] = {};
    for (int d = 0; d < dim; d++) {
      vf row[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) row[n] = load(q + d * kRows + n * W);
#pragma GCC unroll 8
      for (int i = 0; i < K; i++) {
        vf key = splat(reinterpret_cast<const float*>(k[t + i])[d]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sums[i][n] = fma(key, row[n], sums[i][n]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < K; i++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) store(scores + (t + i) * kRows + n * W, sums[i][n]);
  }
}

inline void score_rows(float* scores, const float* q, const char* const* k, int dim, int keys, int vectors) {
  if (vectors == 1) score<1, 8>(scores, q, k, dim, keys);
  else if (vectors == 2) score<2, 4>(scores, q, k, dim, keys);
#if defined(OCTAVO_AVX512)
  else if (vectors == 3) score<3, 4>(scores, q, k, dim, keys);
  else score<4, 4>(scores, q, k, dim, keys);
#endif
}

// What a group of rows carries from tile to tile.
struct State {
  alignas(64) float most[kRows], total[kRows], decay[kRows];
  alignas(64) int32_t low[kRows], high[kRows];  // a row sees keys low .. high - 1
};

// Scores of keys first .. first + keys - 1 become weights, for one vector of rows.
template <bool MASK, bool CAP>
OCTAVO_INLINE void soften_lanes(float* scores, State& s, int n, int first, int keys, float cap) {
  const vi low = load(s.low + n * W), high = load(s.high + n * W);
  vf before = load(s.most + n * W), most = before;
  for (int t = 0; t < keys; t++) {
    vf x = load(scores + t * kRows + n * W);
    if (CAP) x = tanh(x) * splat(cap);
    if (MASK) {
      vi at = splat(first + t);
      x = where((at >= low) & (at < high), x, splat(kNone));
    }
    most = greater(x, most);
    if (CAP || MASK) store(scores + t * kRows + n * W, x);
  }
  vf base = where(most == splat(kNone), vf{}, most), sums = vf{};
  for (int t = 0; t < keys; t++) {
    vf x = load(scores + t * kRows + n * W), p = exp2(x - base);
    if (MASK) p = where(x == splat(kNone), vf{}, p);
    sums += p;
    store(scores + t * kRows + n * W, p);
  }
  vf decay = exp2(before - base);
  store(s.decay + n * W, decay);
  store(s.total + n * W, fma(load(s.total + n * W), decay, sums));
  store(s.most + n * W, most);
}

inline void soften_rows(float* scores, State& s, int vectors, int first, int keys, bool mask, float cap) {
  for (int n = 0; n < vectors; n++) {
    if (cap > 0) {
      if (mask) soften_lanes<true, true>(scores, s, n, first, keys, cap * kLog2e);
      else soften_lanes<false, true>(scores, s, n, first, keys, cap * kLog2e);
    } else if (mask) soften_lanes<true, false>(scores, s, n, first, keys, 0);
    else soften_lanes<false, false>(scores, s, n, first, keys, 0);
  }
}

struct Many {
  int groups, width;
  float* q;       // [groups][k_dim][kRows]
  float* values;  // [groups * kRows][width]
  float* scores;  // [tile + 8][kRows]
  float* k;       // [tile][padded k_dim], where the pages are not float
  float* v;
  State* states;

  static int tile(const Call& c) { return c.dots ? kPairTile : kKeyTile; }
  static size_t floats(const Call& c, int rows) {
    size_t groups = (rows + kRows - 1) / kRows, k = padded(c.pages->k_dim), v = padded(c.pages->v_dim);
    return groups * kRows * (k + v) + (tile(c) + 8) * (size_t)kRows + tile(c) * (k + v) +
           groups * sizeof(State) / sizeof(float) + 64;
  }
  Many(const Call& c, int rows, float* p) : groups((rows + kRows - 1) / kRows), width(padded(c.pages->v_dim)) {
    states = reinterpret_cast<State*>(p);
    p += groups * sizeof(State) / sizeof(float);
    q = p, p += (size_t)groups * kRows * padded(c.pages->k_dim);
    values = p, p += (size_t)groups * kRows * width;
    scores = p, p += (tile(c) + 8) * kRows;
    k = p, p += tile(c) * padded(c.pages->k_dim);
    v = p;
  }
};

// Queries of an item turned: m.q is [group of rows][word][kRows], `words` of four bytes in a row, of which
// word(row, first word, how many) gives one vector. Rows behind the last are like it.
template <class F>
inline void turn_queries(const Call& c, const Item& it, int head, const Many& m, int words, F word) {
  const int last = it.count * c.group - 1;
  for (int r = 0; r < m.groups * kRows; r += W) {
    const char* rows[W];
    for (int i = 0; i < W; i++) rows[i] = query_row(c, it, head, lesser(r + i, last));
    float* q = m.q + (size_t)(r / kRows) * c.pages->k_dim * kRows + r % kRows;
    int d = 0;
    for (; d + W <= words; d += W) transpose(q + d * kRows, kRows, [&](int i) { return word(rows[i], d, W); });
    if (d == words) continue;
    alignas(64) float rest[W * W];
    transpose(rest, W, [&](int i) { return word(rows[i], d, words - d); });
    for (int i = 0; d + i < words; i++) store(q + (d + i) * kRows, load(rest + i * W));
  }
}

template <class E>
inline void load_queries_as(const Call& c, const Item& it, int head, const Many& m) {
  const vf scale = splat(query_scale(c));
  turn_queries(c, it, head, m, c.pages->k_dim, [&](const char* row, int d, int n) {
    const typename E::T* p = reinterpret_cast<const typename E::T*>(row) + d;
    return (n == W ? E::load(p) : load_some<E>(p, n)) * scale;
  });
}

inline void load_queries(const Call& c, const Item& it, int head, const Many& m) {
  if (c.dtype == Dtype::f32) load_queries_as<F32>(c, it, head, m);
  else if (c.dtype == Dtype::bf16) load_queries_as<BF16>(c, it, head, m);
  else load_queries_as<F16>(c, it, head, m);
}

// Rows that have seen nothing yet; those behind the last see what it sees.
inline void begin_rows(const Call& c, const Item& it, const Many& m) {
  const int rows = it.count * c.group;
  for (int r = 0; r < m.groups * kRows; r++) {
    State& s = m.states[r / kRows];
    const int i = r % kRows, p = it.position + lesser(r, rows - 1) / c.group;
    s.most[i] = kNone;
    s.total[i] = 0;
    s.low[i] = c.sight.first_key(p);
    s.high[i] = p + 1;
  }
  std::memset(m.values, 0, sizeof(float) * m.groups * kRows * m.width);
}

inline void deliver_rows(const Call& c, const Item& it, int head, const Many& m) {
  deliver(c, it, head, [&](int r, float& most, float& total) {
    most = m.states[r / kRows].most[r % kRows];
    total = m.states[r / kRows].total[r % kRows];
    return m.values + (size_t)r * m.width;
  });
}

// The tile after this one, asked for some keys at a time in the course of this one.
struct Ahead {
  const Keys* keys;  // null: there is none
  int tile;
  int k_bytes, v_bytes;
  int next = 0;

  void ask() {
    if (!keys || next >= tile) return;
    for (int end = next + tile / 16; next < end; next++) {
      prefetch(keys->k[next], k_bytes);
      prefetch(keys->v[next], v_bytes);
    }
  }
};

// step(keys of a tile, first key, how many, the next tile) for all tiles of an item.
template <int TILE, class F>
OCTAVO_INLINE void by_tiles(const Pages& pages, const Item& it, int head, F step) {
  Keys tiles[2];
  const int size = static_cast<int>(size_of(pages.dtype));
  int count = lesser(TILE, it.key_hi - it.key_lo), turn = 0;
  tiles[0].find(pages, it.table, head, it.key_lo, count, TILE);
  for (int first = it.key_lo; first < it.key_hi; turn ^= 1) {
    const int next = first + count, coming = lesser(TILE, it.key_hi - next);
    if (coming > 0) tiles[turn ^ 1].find(pages, it.table, head, next, coming, TILE);
    Ahead ahead{coming > 0 ? &tiles[turn ^ 1] : nullptr, TILE, pages.k_dim * size, pages.v_dim * size};
    step(tiles[turn], first, count, ahead);
    first = next;
    count = coming;
  }
}

template <class E>
inline void attend_many(const Call& c, const Item& it, int head, float* scratch) {
  const Pages& pages = *c.pages;
  const int rows = it.count * c.group;
  const Many m(c, rows, scratch);
  load_queries(c, it, head, m);
  begin_rows(c, it, m);
  by_tiles<kKeyTile>(pages, it, head, [&](Keys& keys, int first, int count, Ahead& ahead) {
    if (c.pages->dtype != Dtype::f32) widen_tile<E>(pages, keys, count, m.k, m.v, true);
    for (int g = 0; g < m.groups; g++) {
      State& s = m.states[g];
      // Bounds rise with the row: the first row is the last to see low keys, the last row the first to see high ones.
      const int a = larger(first, s.low[0]) - first, b = lesser(first + count, s.high[kRows - 1]) - first;
      if (a >= b) continue;
      const int vectors = lesser(kVectors, (rows - g * kRows + W - 1) / W);
      const bool mask = s.low[kRows - 1] > first + a || s.high[0] < first + b;
      score_rows(m.scores, m.q + (size_t)g * pages.k_dim * kRows, keys.k + a, pages.k_dim, b - a, vectors);
      soften_rows(m.scores, s, vectors, first + a, b - a, mask, c.softcap);
      for (int r = 0; r < vectors * W; r += 4) {
        ahead.ask();
        weigh_all<F32, 4, 1, kRows>(m.values + (size_t)(g * kRows + r) * m.width, pages.v_dim, s.decay + r,
                                    m.scores + r, keys.v + a, b - a, nullptr, 0);
      }
    }
  });
  deliver_rows(c, it, head, m);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
