// The linear kernels of one instruction set; compiled once for each, as kernels.cpp is.
// Tile times panel keeps all its sums in registers; linear_pack.h says how both lie, linear_results.h where they go.
#if defined(OCTAVO_AVX512)
#include "linear_dots.h"
#else
#include "linear_results.h"
#endif

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

// R rows times P panels over `units` units: one chain, added to what `sums` hold.
template <class M, int R, int P>
OCTAVO_INLINE void chain(const char* const* w, const float* x, int units, vf (&sums)[P][R][2]) {
  constexpr int kBytes = kUnit<typename M::Pack>, kStep = kRun / M::kPlaces;
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
}

template <int R, int P>
OCTAVO_INLINE void put_aside(float* totals, const vf (&sums)[P][R][2]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      store(totals + (r * P + p) * kPanel, sums[p][r][0]);
      store(totals + (r * P + p) * kPanel + W, sums[p][r][1]);
    }
}

template <int R, int P>
OCTAVO_INLINE void add_aside(const float* totals, vf (&sums)[P][R][2]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      sums[p][r][0] = load(totals + (r * P + p) * kPanel) + sums[p][r][0];
      sums[p][r][1] = load(totals + (r * P + p) * kPanel + W) + sums[p][r][1];
    }
}

// Where the sums of a tile's first row go, if they are stored as they are.
struct Target {
  char* out;
  int64_t stride;
};

// All chains of one tile and P panels, each chain added to those before it; then what becomes of them.
template <class M, int R, int P>
inline void tile_panels(const Product& c, const Tile& tile, int64_t panel, Target to, float* totals) {
  using E = typename M::Pack;
  const Panels& m = *c.panels;
  constexpr int kUnits = kDepth / E::kInputs;
  const int all = static_cast<int>((m.inputs + E::kInputs - 1) / E::kInputs);
  const char* w[P];
  for (int p = 0; p < P; p++) w[p] = m.weights + (panel + p * (c.apart ? c.apart : 1)) * m.panel_bytes;
  const float* x = tile.x;
  for (int at = 0;; at += kUnits) {
    vf sums[P][R][2] = {};
    chain<M, R, P>(w, x, lesser(kUnits, all - at), sums);
    if (at) add_aside<R, P>(totals, sums);
    if (all - at <= kUnits) {
      if (to.out && (panel + P) * kPanel <= m.outputs) {
        constexpr bool kDot = M::kPlaces < E::kInputs;
        if (c.out_dtype == Dtype::bf16) return store_sums<BF16, kDot, R, P>(c, panel, to.out, to.stride, sums);
        if (c.out_dtype == Dtype::f32) return store_sums<F32, kDot, R, P>(c, panel, to.out, to.stride, sums);
      }
      put_aside<R, P>(totals, sums);
      return deliver(c, tile, panel, P, totals);
    }
    put_aside<R, P>(totals, sums);
    for (int p = 0; p < P; p++) w[p] += (int64_t)kUnits * kUnit<E>;
    x += (int64_t)kUnits * M::kPlaces * R;
  }
}

// A tile of gates, then one of what they are multiplied with: both stay in the first-level cache.
template <class M, class E, int R>
inline void gated_panels(const Product& c, const Tile& tile, int64_t panel, float* totals) {
  constexpr int64_t kBoth = 2 * kPanel;
  char* gates = reinterpret_cast<char*>(totals + R * kBoth);
  char* by = gates + kPanel * sizeof(typename E::T);
  if constexpr (R <= kRowsOfMany) {
    tile_panels<M, R, 2>(c, tile, panel, {gates, kBoth}, totals);
  } else {
    tile_panels<M, R, 1>(c, tile, panel, {gates, kBoth}, totals);
    tile_panels<M, R, 1>(c, tile, panel + c.apart, {by, kBoth}, totals);
  }
  gate_tile<E, (M::kPlaces < M::Pack::kInputs)>(c, tile, panel, gates, by, kBoth);
}

#if defined(OCTAVO_AVX512)
#define OCTAVO_EACH_ROWS(f) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11) f(12)
#else
#define OCTAVO_EACH_ROWS(f) f(1) f(2) f(3) f(4) f(5) f(6)
#endif

// Several panels side by side only where the rows leave registers for them.
template <class M, int R>
inline void tile_rows(const Product& c, const Tile& tile, int64_t panel, int panels, float* totals) {
  // What is gated is of one type throughout.
  if constexpr (M::kPlaces < M::Pack::kInputs) {
    if (c.apart) return gated_panels<M, BF16, R>(c, tile, panel, totals);
  } else if constexpr (sizeof(typename M::Pack::T) == 4) {
    if (c.apart) return gated_panels<M, F32, R>(c, tile, panel, totals);
  }
  const Target to{c.out ? c.out + (tile.first * c.out_stride + panel * kPanel) * size_of(c.out_dtype) : nullptr,
                  c.out_stride};
  if constexpr (R <= kRowsOfMany) {
    if (panels == 2) return tile_panels<M, R, 2>(c, tile, panel, to, totals);
  }
  tile_panels<M, R, 1>(c, tile, panel, to, totals);
}

template <class M>
void multiply_as(const Product& c, int64_t panel, int panels, float* totals) {
  for (int t = 0; t < c.count; t++) switch (const Tile& tile = c.tiles[t]; tile.rows) {
#define OCTAVO_ROWS(n) \
      case n: tile_rows<M, n>(c, tile, panel, panels, totals); break;
      OCTAVO_EACH_ROWS(OCTAVO_ROWS)
#undef OCTAVO_ROWS
    }
}

// ---- weights that are widened once for many tiles; the sums are the same ----

template <int R>
inline void wide_chain(const char* w, const float* x, int inputs, float* totals, bool fresh) {
  vf sums[1][R][2] = {};
  chain<Multiply<PackF32>, R, 1>(&w, x, inputs, sums);
  if (!fresh) add_aside<R, 1>(totals, sums);
  put_aside<R, 1>(totals, sums);
}

inline void wide_rows(const float* wide, const float* x, int rows, int inputs, float* totals, bool fresh) {
  const char* w = reinterpret_cast<const char*>(wide);
  switch (rows) {
#define OCTAVO_ROWS(n) \
    case n: return wide_chain<n>(w, x, inputs, totals, fresh);
    OCTAVO_EACH_ROWS(OCTAVO_ROWS)
#undef OCTAVO_ROWS
  }
}

template <class E>
inline void widen_panel(float* to, const char* from, int inputs) {
  for (int k = 0; k < inputs; k += E::kInputs, from += kUnit<E>) {
    vf w[E::kInputs][2];
    E::load(from, w);
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

// `widen(to, panel, k, inputs)` gives a panel's weights from input k on as float32, whole units of UNIT inputs.
template <int UNIT, class Widen>
inline void multiply_wide(const Product& c, int64_t panel, float* scratch, Widen widen) {
  const Panels& m = *c.panels;
  float* wide = scratch;
  float* const totals = scratch + (size_t)kDepth * kPanel;
  for (int64_t k = 0; k < m.inputs; k += kDepth) {
    const int inputs = static_cast<int>(m.inputs - k < kDepth ? m.inputs - k : kDepth);
    widen(wide, m.weights + panel * m.panel_bytes, k, inputs);
    const int whole = (inputs + UNIT - 1) / UNIT * UNIT;
    float* to = totals;
    for (int t = 0; t < c.count; to += (size_t)c.tiles[t++].rows * kPanel)
      wide_rows(wide, c.tiles[t].x + k * c.tiles[t].rows, c.tiles[t].rows, whole, to, k == 0);
  }
  float* row = totals;
  for (int t = 0; t < c.count; row += (size_t)c.tiles[t++].rows * kPanel) deliver(c, c.tiles[t], panel, 1, row);
}

template <class E>
void multiply_narrow(const Product& c, int64_t panel, int panels, float* scratch) {
  if (c.count < kWidenTiles) return multiply_as<Multiply<E>>(c, panel, panels, scratch);
  multiply_wide<E::kInputs>(c, panel, scratch, [](float* to, const char* from, int64_t k, int inputs) {
    widen_panel<E>(to, from + k / E::kInputs * kUnit<E>, inputs);
  });
}

// Quantised weights where there are no dots, scales and all.
template <class G>
void multiply_groups(const Product& c, int64_t panel, float* scratch) {
  multiply_wide<1>(c, panel, scratch, [](float* to, const char* from, int64_t k, int inputs) {
    widen_groups<G>(to, from + k / kGroup * G::kBytes, inputs);
  });
}

// ---- a work item ----

size_t scratch(const Product& c) {
  size_t rows = 0;
  for (int t = 0; t < c.count; t++) rows += c.tiles[t].rows;
  return rows * kPanel * 4 + (size_t)kDepth * kPanel;
}

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
  else if (c.panels->dtype == Dtype::bf16) multiply_narrow<PackBF16>(c, panel, panels, scratch);
  else multiply_narrow<PackF16>(c, panel, panels, scratch);
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
