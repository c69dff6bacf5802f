// What few.h does over keys that rows of several chunks share: the rows lie side by side in the lanes, as in many.h, so
// that nothing is summed across lanes. Every sum of a row is the one that few.h forms for that row alone, its parts in
// the same order: who is beside it changes no bit.
#pragma once

#include <type_traits>

#include "pairs.h"
#include "rows.h"

namespace octavo {
namespace OCTAVO_ISA {

constexpr int kSide = kTogetherRows;  // rows side by side
constexpr int kSideRows = 12;         // fewer than these fill too few lanes

#if defined(OCTAVO_AVX512)

// Rows side by side: what they carry from tile to tile, and what a tile needs.
struct Side {
  int words;                  // groups of four bytes in a key
  float* q;                   // [vector of rows][words][W]
  float* scores;              // [kKeyTile][kSide]
  float* weights;             // where those are pairs of keys: [kKeyTile / 2][kSide]
  float* values;              // and the tile's values, woven: [kKeyTile / 2][width]
  float* total;               // [W][kSide]: one for each lane that few.h has
  int32_t *low, *high;        // a row sees keys low .. high - 1
  int last_low, first_high;   // over all rows

  static size_t floats(const Pages& pages) {
    return kSide * (padded(pages.k_dim) + kKeyTile + kKeyTile / 2 + W + 2) + kKeyTile / 2 * padded(pages.v_dim);
  }
  Side(const Pages& pages, int words_, float* p) : words(words_) {
    q = p, p += kSide * padded(pages.k_dim);
    scores = p, p += kKeyTile * kSide;
    weights = p, p += kKeyTile / 2 * kSide;
    values = p, p += kKeyTile / 2 * padded(pages.v_dim);
    total = p, p += W * kSide;
    low = reinterpret_cast<int32_t*>(p), high = low + kSide;
    last_low = 0, first_high = 0x7fffffff;
    std::memset(total, 0, sizeof(float) * W * kSide);
  }
};

// Four bytes of a key, a float or a pair of bfloat16, times those of W rows.
template <class E>
OCTAVO_INLINE vf side_step(const char* key, vf row, vf sum) {
  if constexpr (std::is_same<E, Pairs>::value) return dot_pairs(row, splat_pair(key), sum);
  else return fma(row, splat(*reinterpret_cast<const float*>(key)), sum);
}

// Sums of K keys and W rows: first what one lane of few.h holds, then lanes as store_sums adds them.
template <class E, int K, int LEVEL>
OCTAVO_INLINE void side_sums(vf (&sums)[K], const float* q, const char* const* k, int lane, int words) {
  constexpr int kApart[] = {4, 8, 1, 2};  // of the lanes that are added, the last addition first
#pragma GCC unroll 4
  for (int i = 0; i < K; i++) sums[i] = vf{};
  if constexpr (LEVEL < 4) {
    vf others[K];
    side_sums<E, K, LEVEL + 1>(sums, q, k, lane, words);
    side_sums<E, K, LEVEL + 1>(others, q, k, lane + kApart[LEVEL], words);
#pragma GCC unroll 4
    for (int i = 0; i < K; i++) sums[i] += others[i];
  } else {
#pragma GCC unroll 4
    for (int d = lane; d < words; d += W) {
      const vf row = load(q + d * W);
#pragma GCC unroll 4
      for (int i = 0; i < K; i++) sums[i] = side_step<E>(k[i] + d * 4, row, sums[i]);
    }
  }
}

template <class E>
inline void side_scores(float* scores, const float* q, const char* const* k, int words) {
  constexpr int K = 4;
  for (int t = 0; t < kKeyTile; t += K) {
    vf sums[K];
    if (words == 64) side_sums<E, K, 0>(sums, q, k + t, 0, 64);
    else if (words == 32) side_sums<E, K, 0>(sums, q, k + t, 0, 32);
    else side_sums<E, K, 0>(sums, q, k + t, 0, words);
#pragma GCC unroll 4
    for (int i = 0; i < K; i++) store(scores + (t + i) * kSide, sums[i]);
  }
}

// As soften() in few.h for W rows from row `n` on.
template <bool PAIRS, bool MASK>
OCTAVO_INLINE void side_soften(const Side& s, int n, const Keys* scaled, float scale, int first, float cap, float* most,
                               float* decay) {
  float* scores = s.scores + n;
  const vi low = load(s.low + n), high = load(s.high + n);
  const vf before = load(most + n);
  vf top = before;
  for (int t = 0; t < kKeyTile; t++) {
    vf x = load(scores + t * kSide);
    if (PAIRS) x *= splat(scale);
    if (scaled) x *= splat(scaled->k_scale[t]);
    if (cap > 0) x = tanh(x) * splat(cap * kLog2e);
    if (MASK) {
      vi at = splat(first + t);
      x = where((at >= low) & (at < high), x, splat(kNone));
    }
    top = greater(x, top);
    if (PAIRS || MASK || scaled || cap > 0) store(scores + t * kSide, x);
  }
  const vf base = where(top == splat(kNone), vf{}, top), by = exp2(before - base);
  store(most + n, top);
  store(decay + n, by);
  const auto weight = [&](int t, vf& sum) {
    const vf x = load(scores + t * kSide);
    vf p = PAIRS ? exp2_short(x - base) : exp2(x - base);
    if (MASK) p = where(x == splat(kNone), vf{}, p);
    sum += p;
    return p;
  };
  for (int lane = 0; lane < W; lane += 2) {
    float* total = s.total + lane * kSide + n;
    vf even = load(total) * by, odd = load(total + kSide) * by;
    __asm__("" : "+v"(even), "+v"(odd));  // products of their own, as there: not the beginning of a fused addition
    for (int t = lane; t < kKeyTile; t += W) {
      const vf a = weight(t, even), b = weight(t + 1, odd);
      if (PAIRS) {
        store(s.weights + t / 2 * kSide + n, pair(a, b));
      } else {
        store(scores + t * kSide, scaled ? a * splat(scaled->v_scale[t]) : a);
        store(scores + (t + 1) * kSide, scaled ? b * splat(scaled->v_scale[t + 1]) : b);
      }
    }
    store(total, even);
    store(total + kSide, odd);
  }
}

// Values of a tile as pairs of keys, woven as few_pairs.h does.
inline void weave(float* to, const Keys& keys, int dims) {
  for (int t = 0; t < kKeyTile; t += 2)
    for (int d = 0; d < dims; d += kWoven, to += kWoven) {
      const __m512i a = _mm512_loadu_si512(keys.v[t] + d * 2), b = _mm512_loadu_si512(keys.v[t + 1] + d * 2);
      store(to, (vf)_mm512_unpacklo_epi16(a, b));
      store(to + W, (vf)_mm512_unpackhi_epi16(a, b));
    }
}

#endif

}  // namespace OCTAVO_ISA
}  // namespace octavo
