// The linear kernels of one instruction set; compiled once for each, as kernels.cpp is.
// Tile times panel keeps all its sums in registers; linear_pack.h says how both lie.
#include "linear_pack.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// ---- tile times panels ----

// One unit of E's weights times R rows, by multiply-adds.
template <class E>
struct Multiply {
  using Pack = E;
  static constexpr int kPlaces = E::kInputs;  // of a row, in x
  template <int R>
  static OCTAVO_INLINE void unit(const char* p, const float* x, vf (&sums)[R][2]) {
    vf w[E::kInputs][2];
    E::load(p, w);
#pragma GCC unroll 4
    for (int i = 0; i < E::kInputs; i++)
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        vf one = splat(x[r * kRun + i]);
        sums[r][0] = fma(one, w[i][0], sums[r][0]);
        sums[r][1] = fma(one, w[i][1], sums[r][1]);
      }
  }
};

#if defined(OCTAVO_AVX512)
// Pairs of bfloat16 by the processor's own dot. Written out: the compiler may not use it anywhere else.
struct Dot {
  using Pack = PackBF16;
  static constexpr int kPlaces = 1;
  template <int R>
  static OCTAVO_INLINE void unit(const char* p, const float* x, vf (&sums)[R][2]) {
    vf a = load(reinterpret_cast<const float*>(p)), b = load(reinterpret_cast<const float*>(p) + W);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      vi pair;
      std::memcpy(&pair[0], x + r * kRun, 4);
      vf one = (vf)splat(pair[0]);
      __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums[r][0]) : "v"(one), "v"(a));
      __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums[r][1]) : "v"(one), "v"(b));
    }
  }
};
#endif

#if defined(OCTAVO_AVX512)
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
#endif

// R rows times P panels over `units` units, one chain; added to totals[row][P * kPanel], or put there.
template <class M, int R, int P>
OCTAVO_INLINE void chain(const char* const* w, const float* x, int units, float* totals, bool fresh) {
  constexpr int kBytes = kUnit<typename M::Pack>, kStep = kRun / M::kPlaces;
  vf sums[P][R][2] = {};
  int u = 0;
  for (; u + kStep <= units; u += kStep, x += kRun * R) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 16
      for (int i = 0; i < kStep * kBytes; i += 64)
        __builtin_prefetch(w[p] + (int64_t)u * kBytes + ahead_of(R) + i, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < kStep; i++)
#pragma GCC unroll 4
      for (int p = 0; p < P; p++)
        M::template unit<R>(w[p] + (int64_t)(u + i) * kBytes, x + i * M::kPlaces, sums[p]);
  }
  for (; u < units; u++, x += M::kPlaces)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) M::template unit<R>(w[p] + (int64_t)u * kBytes, x, sums[p]);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      float* to = totals + (r * P + p) * kPanel;
      store(to, fresh ? sums[p][r][0] : load(to) + sums[p][r][0]);
      store(to + W, fresh ? sums[p][r][1] : load(to + W) + sums[p][r][1]);
    }
}

// Several panels side by side only where the rows leave registers for them.
template <class M, int R>
inline void chains(const char* const* w, const float* x, int units, float* totals, bool fresh, int panels) {
  if constexpr (R <= kRowsOfMany) {
    if (panels == 2) return chain<M, R, 2>(w, x, units, totals, fresh);
  }
  chain<M, R, 1>(w, x, units, totals, fresh);
}

template <class M>
inline void chain_rows(const char* const* w, const float* x, int rows, int units, float* totals, bool fresh,
                       int panels) {
#define OCTAVO_ROWS(n) \
  case n: return chains<M, n>(w, x, units, totals, fresh, panels);
  switch (rows) {
    OCTAVO_ROWS(1) OCTAVO_ROWS(2) OCTAVO_ROWS(3) OCTAVO_ROWS(4) OCTAVO_ROWS(5) OCTAVO_ROWS(6)
#if defined(OCTAVO_AVX512)
    OCTAVO_ROWS(7) OCTAVO_ROWS(8) OCTAVO_ROWS(9) OCTAVO_ROWS(10) OCTAVO_ROWS(11) OCTAVO_ROWS(12)
#endif
  }
#undef OCTAVO_ROWS
}

template <class E>
inline void widen_panel(float* to, const char* from, int units) {
  for (int u = 0; u < units; u++) {
    vf w[E::kInputs][2];
    E::load(from + (int64_t)u * kUnit<E>, w);
    for (int i = 0; i < E::kInputs; i++, to += kPanel) {
      store(to, w[i][0]);
      store(to + W, w[i][1]);
    }
  }
}

template <class G>
inline void widen_groups(float* to, const char* group, int inputs) {
  for (int k = 0; k < inputs; k += kGroup, group += G::kBytes, to += kGroup * kPanel)
    for (int v = 0; v < 2; v++) {
      const vf scale = scale_of(group, v), shift = G::kShifted ? shift_of(group, v) : vf{};
      for (int i = 0; i < kGroup; i++) {
        vi whole = G::lane(word_of, group + G::kHead, i, v) - splat(G::kOffset);
        vf wide = __builtin_convertvector(whole, vf);
        store(to + i * kPanel + v * W, G::kShifted ? fma(wide, scale, shift) : wide * scale);
      }
    }
}

// ---- results ----

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

// ---- a work item ----

size_t scratch(const Product& c) {
  size_t rows = 0;
  for (int t = 0; t < c.count; t++) rows += c.tiles[t].rows;
  return rows * kPanel * 2 + (size_t)kDepth * kPanel;
}

void deliver(const Product& c, int64_t panel, int panels, float* row) {
  for (int t = 0; t < c.count; t++)
    for (int r = 0; r < c.tiles[t].rows; r++)
      for (int p = 0; p < panels; p++, row += kPanel) deliver_row(c, row, c.tiles[t].first + r, panel + p);
}

template <class M>
void multiply_as(const Product& c, int64_t panel, int panels, float* scratch) {
  using E = typename M::Pack;
  const Panels& m = *c.panels;
  float* wide = scratch;
  float* totals = scratch + (size_t)kDepth * kPanel;
  // From so many tiles on, a panel is widened once for all of them; the sums are the same.
  const bool widen = sizeof(typename E::T) < 4 && M::kPlaces == E::kInputs && c.count >= kWidenTiles;
  for (int64_t k = 0; k < m.inputs; k += kDepth) {
    const int inputs = static_cast<int>(m.inputs - k < kDepth ? m.inputs - k : kDepth);
    const int units = (inputs + E::kInputs - 1) / E::kInputs;
    const int64_t at = k / E::kInputs;
    const char* w[2];
    for (int p = 0; p < panels; p++) w[p] = m.weights + (panel + p) * m.panel_bytes + at * kUnit<E>;
    if (widen) {
      widen_panel<E>(wide, w[0], units);
      w[0] = reinterpret_cast<const char*>(wide);
    }
    float* to = totals;
    for (int t = 0; t < c.count; t++) {
      const Tile& tile = c.tiles[t];
      const float* x = tile.x + at * M::kPlaces * tile.rows;
      if (widen) chain_rows<Multiply<PackF32>>(w, x, tile.rows, units * E::kInputs, to, k == 0, 1);
      else chain_rows<M>(w, x, tile.rows, units, to, k == 0, panels);
      to += (size_t)tile.rows * panels * kPanel;
    }
  }
  deliver(c, panel, panels, totals);
}

// Quantised weights where there are no dots: each panel is widened, scales and all.
template <class G>
void multiply_groups(const Product& c, int64_t panel, float* scratch) {
  const Panels& m = *c.panels;
  float* totals = scratch + (size_t)kDepth * kPanel;
  for (int64_t k = 0; k < m.inputs; k += kDepth) {
    const int inputs = static_cast<int>(m.inputs - k < kDepth ? m.inputs - k : kDepth);
    widen_groups<G>(scratch, m.weights + panel * m.panel_bytes + k / kGroup * G::kBytes, inputs);
    const char* w[1] = {reinterpret_cast<const char*>(scratch)};
    float* to = totals;
    for (int t = 0; t < c.count; to += (size_t)c.tiles[t++].rows * kPanel)
      chain_rows<Multiply<PackF32>>(w, c.tiles[t].x + k * c.tiles[t].rows, c.tiles[t].rows, inputs, to, k == 0, 1);
  }
  deliver(c, panel, 1, totals);
}

#if defined(OCTAVO_AVX512)
template <class Q>
void multiply_dots(const Product& c, int64_t panel, float* scratch) {
  const Panels& m = *c.panels;
  float* totals = scratch;
  constexpr int kGroups = kDepth / kGroup;
  const int all = static_cast<int>((m.inputs + kGroup - 1) / kGroup);
  const auto run = c.count > 1 ? dots_rows<Q, true> : dots_rows<Q, false>;
  for (int g = 0; g < all; g += kGroups) {
    const char* w = m.weights + panel * m.panel_bytes + (int64_t)g * Q::Group::kBytes;
    float* to = totals;
    for (int t = 0; t < c.count; t++) {
      const Tile& tile = c.tiles[t];
      const float* x = tile.x + (int64_t)g * kQuadRun * tile.rows;
      run(w, x, tile.rows, lesser(kGroups, all - g), to, g == 0);
      to += (size_t)tile.rows * kPanel;
    }
  }
  deliver(c, panel, 1, totals);
}
#endif

// `panels` is 1, or 2 where there are no more than `rows_of_many` rows and nothing is quantised.
void multiply(const Product& c, int64_t panel, int panels, float* scratch) {
#if defined(OCTAVO_AVX512)
  if (c.form == Form::pairs) return multiply_as<Dot>(c, panel, panels, scratch);
  if (c.form == Form::quads_i8) return multiply_dots<DotI8>(c, panel, scratch);
  if (c.form == Form::quads_i4) return multiply_dots<DotI4>(c, panel, scratch);
#endif
  if (c.panels->dtype == Dtype::i8) return multiply_groups<GroupI8>(c, panel, scratch);
  if (c.panels->dtype == Dtype::i4) return multiply_groups<GroupI4>(c, panel, scratch);
  if (c.panels->dtype == Dtype::f32) multiply_as<Multiply<PackF32>>(c, panel, panels, scratch);
  else if (c.panels->dtype == Dtype::bf16) multiply_as<Multiply<PackBF16>>(c, panel, panels, scratch);
  else multiply_as<Multiply<PackF16>>(c, panel, panels, scratch);
}

}  // namespace
}  // namespace OCTAVO_ISA

namespace linear {
#define OCTAVO_TEXT(x) #x
#define OCTAVO_NAME(x) OCTAVO_TEXT(x)
extern const LinearKernels OCTAVO_TABLE = {
    OCTAVO_NAME(OCTAVO_ISA), OCTAVO_ISA::kPanel, OCTAVO_ISA::kTile,  OCTAVO_ISA::kRowsOfMany, OCTAVO_ISA::bytes,
    OCTAVO_ISA::pack,        OCTAVO_ISA::unpack, OCTAVO_ISA::gather, OCTAVO_ISA::scratch, OCTAVO_ISA::multiply};
}  // namespace linear
}  // namespace octavo
