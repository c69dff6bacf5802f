// Weights in int8 and int4 times rows that were rounded to eight bits, by the processor's own dots of bytes.
// Included by linear_kernels.cpp, for AVX-512 alone.
#pragma once

#include "linear_results.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

OCTAVO_INLINE void dot_quads(vi& sums, vi weights, int32_t row) {  // weights from 0, the row's signed
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(splat(row)));
}

// A group of eight-bit inputs times weights, summed exactly in integers.
struct DotI8 {
  using Group = GroupI8;
  template <int R>
  static OCTAVO_INLINE void group(const char* p, const int32_t* x, vi (&whole)[R][2]) {
#pragma GCC unroll 8
    for (int j = 0; j < kGroup / 4; j++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        vi word = word_of(p + Group::kHead, j, v);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) dot_quads(whole[r][v], word, x[r * kQuadRun + j]);
      }
  }
};

struct DotI4 {
  using Group = GroupI4;
  template <int R>
  static OCTAVO_INLINE void group(const char* p, const int32_t* x, vi (&whole)[R][2]) {
    constexpr int kHalf = kGroup / 8;
#pragma GCC unroll 4
    for (int j = 0; j < kHalf; j++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        vi word = word_of(p + Group::kHead, j, v), low = word & splat(0x0f0f0f0f), high = (word >> 4) & splat(0x0f0f0f0f);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          dot_quads(whole[r][v], low, x[r * kQuadRun + j]);
          dot_quads(whole[r][v], high, x[r * kQuadRun + j + kHalf]);
        }
      }
  }
};

// AMONG: of several tiles, which leave time for what is far ahead however few rows one has.
template <class Q, int R, bool AMONG>
OCTAVO_INLINE void dots(const char* w, const float* x, int groups, float* totals, bool fresh) {
  constexpr int kBytes = Q::Group::kBytes, kAhead = ahead_of(AMONG ? kMostTile : R);
  vf sums[R][2] = {};
  for (int g = 0; g < groups; g++, w += kBytes, x += kQuadRun * R) {
#pragma GCC unroll 1
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(w + kAhead + i, 0, 2);
    const int32_t* quads = reinterpret_cast<const int32_t*>(x);
    vi whole[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      whole[r][0] = whole[r][1] = Q::Group::kShifted ? vi{} : splat(quads[r * kQuadRun + kGroup / 4]);
    Q::template group<R>(w, quads, whole);
    const vf a = scale_of(w, 0), b = scale_of(w, 1);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const vf scale = splat(x[r * kQuadRun + kGroup / 4 + 1]);
      sums[r][0] = fma(__builtin_convertvector(whole[r][0], vf), a * scale, sums[r][0]);
      sums[r][1] = fma(__builtin_convertvector(whole[r][1], vf), b * scale, sums[r][1]);
      if constexpr (Q::Group::kShifted) {
        const vf total = splat(x[r * kQuadRun + kGroup / 4]);
        sums[r][0] = fma(total, shift_of(w, 0), sums[r][0]);
        sums[r][1] = fma(total, shift_of(w, 1), sums[r][1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 2; v++) {
      float* to = totals + r * kPanel + v * W;
      store(to, fresh ? sums[r][v] : load(to) + sums[r][v]);
    }
}

template <class Q, bool AMONG>
inline void dots_rows(const char* w, const float* x, int rows, int groups, float* totals, bool fresh) {
#define OCTAVO_ROWS(n) \
  case n: return dots<Q, n, AMONG>(w, x, groups, totals, fresh);
  switch (rows) {
    OCTAVO_ROWS(1) OCTAVO_ROWS(2) OCTAVO_ROWS(3) OCTAVO_ROWS(4) OCTAVO_ROWS(5) OCTAVO_ROWS(6)
  }
#undef OCTAVO_ROWS
}

template <class Q>
void multiply_dots(const Product& c, int64_t panel, float* totals) {
  const Panels& m = *c.panels;
  constexpr int kGroups = kDepth / kGroup;
  const int all = static_cast<int>((m.inputs + kGroup - 1) / kGroup);
  const auto run = c.count > 1 ? dots_rows<Q, true> : dots_rows<Q, false>;
  const char* w = m.weights + panel * m.panel_bytes;
  for (int t = 0; t < c.count; t++) {
    const Tile& tile = c.tiles[t];
    for (int g = 0; g < all; g += kGroups)
      run(w + (int64_t)g * Q::Group::kBytes, tile.x + (int64_t)g * kQuadRun * tile.rows, tile.rows,
          lesser(kGroups, all - g), totals, g == 0);
    deliver(c, tile, panel, 1, totals);
  }
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
