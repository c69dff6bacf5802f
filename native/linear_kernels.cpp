// The linear kernels of one instruction set; compiled once for each, as kernels.cpp is.
// A panel is two vectors of outputs, its weights lie as [input][output]; a tile is some rows of inputs, which lie as
// [input][row]. Tile times panel keeps all its sums in registers.
#include "linear.h"
#include "rows.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kPanel = 2 * W;
constexpr int kTile = W == 16 ? kMostTile : kMostTile / 2;
constexpr int kAhead = 2048;      // bytes of a panel that are asked for before they are used
constexpr int kWidenTiles = 3;    // from so many tiles on, a panel is widened once for all of them

// ---- how a panel's weights of one input are stored: two vectors ----

struct PairF32 {
  static constexpr int kBytes = 4 * kPanel;
  static OCTAVO_INLINE void load(const char* p, vf& a, vf& b) {
    a = F32::load(reinterpret_cast<const float*>(p));
    b = F32::load(reinterpret_cast<const float*>(p) + W);
  }
  static void put(char* p, int i, float x) { reinterpret_cast<float*>(p)[i] = x; }
};

struct PairBF16 {  // the two vectors in the halves of 32-bit lanes: a shift and a mask widen them
  static constexpr int kBytes = 2 * kPanel;
  static OCTAVO_INLINE void load(const char* p, vf& a, vf& b) {
    vu both = (vu)OCTAVO_ISA::load(reinterpret_cast<const int32_t*>(p));
    a = (vf)(both << 16);
    b = (vf)(both & 0xffff0000u);
  }
  static void put(char* p, int i, float x) {
    alignas(64) uint16_t lanes[W];
    BF16::store(lanes, splat(x));
    reinterpret_cast<uint16_t*>(p)[i < W ? 2 * i : 2 * (i - W) + 1] = lanes[0];
  }
};

struct PairF16 {
  static constexpr int kBytes = 2 * kPanel;
  static OCTAVO_INLINE void load(const char* p, vf& a, vf& b) {
    a = F16::load(reinterpret_cast<const uint16_t*>(p));
    b = F16::load(reinterpret_cast<const uint16_t*>(p) + W);
  }
  static void put(char* p, int i, float x) {
    alignas(64) uint16_t lanes[W];
    F16::store(lanes, splat(x));
    reinterpret_cast<uint16_t*>(p)[i] = lanes[0];
  }
};

struct PairI8 {
  static constexpr int kBytes = kPanel;
  static OCTAVO_INLINE void load(const char* p, vf& a, vf& b) {
    a = I8::load(reinterpret_cast<const int8_t*>(p));
    b = I8::load(reinterpret_cast<const int8_t*>(p) + W);
  }
  static void put(char* p, int i, float x) { p[i] = static_cast<int8_t>(x); }
};

int64_t bytes(Dtype dtype, int64_t inputs) { return inputs * kPanel * size_of(dtype); }

template <class E>
void pack_as(const Panels& m, int64_t output, const float* row) {
  char* p = m.weights + output / kPanel * m.panel_bytes;
  for (int64_t k = 0; k < m.inputs; k++) E::put(p + k * E::kBytes, static_cast<int>(output % kPanel), row[k]);
}

void widen_row(Dtype from, float* to, const char* row, int64_t n) {
  if (from != Dtype::i8) return widen_any(from, to, row, static_cast<int>(n), 1.0f);
  for (int64_t k = 0; k < n; k++) to[k] = reinterpret_cast<const int8_t*>(row)[k];
}

void pack(const Panels& m, int64_t output, Dtype from, const char* row) {
  std::vector<float> wide(m.inputs + W);
  widen_row(from, wide.data(), row, m.inputs);
  if (m.dtype == Dtype::f32) pack_as<PairF32>(m, output, wide.data());
  else if (m.dtype == Dtype::bf16) pack_as<PairBF16>(m, output, wide.data());
  else if (m.dtype == Dtype::f16) pack_as<PairF16>(m, output, wide.data());
  else pack_as<PairI8>(m, output, wide.data());
}

// Rows of inputs as float32, [input][row].
template <class E>
void gather_as(const char* x, int64_t x_stride, int rows, int64_t inputs, float* to) {
  for (int r = 0; r < rows; r++) {
    const typename E::T* p = reinterpret_cast<const typename E::T*>(x) + r * x_stride;
    int64_t k = 0;
    for (; k + W <= inputs; k += W) {
      vf v = E::load(p + k);
      for (int i = 0; i < W; i++) to[(k + i) * rows + r] = v[i];
    }
    if (k < inputs) {
      vf v = load_some<E>(p + k, static_cast<int>(inputs - k));
      for (int i = 0; k + i < inputs; i++) to[(k + i) * rows + r] = v[i];
    }
  }
}

void gather(Dtype from, const char* x, int64_t x_stride, int rows, int64_t inputs, float* to) {
  if (from == Dtype::f32) gather_as<F32>(x, x_stride, rows, inputs, to);
  else if (from == Dtype::bf16) gather_as<BF16>(x, x_stride, rows, inputs, to);
  else gather_as<F16>(x, x_stride, rows, inputs, to);
}

// ---- tile times panels ----

// R rows times P panels over `inputs` inputs, one chain; added to totals[row][P * kPanel], or put there.
template <class E, int R, int P>
OCTAVO_INLINE void chain(const char* const* w, const float* x, int inputs, float* totals, bool fresh) {
  vf sums[P][R][2] = {};
  auto step = [&](int k) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      vf a, b;
      E::load(w[p] + (int64_t)k * E::kBytes, a, b);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        vf one = splat(x[k * R + r]);
        sums[p][r][0] = fma(one, a, sums[p][r][0]);
        sums[p][r][1] = fma(one, b, sums[p][r][1]);
      }
    }
  };
  constexpr int kStep = 4;
  int k = 0;
  for (; k + kStep <= inputs; k += kStep) {
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 16
      for (int i = 0; i < kStep * E::kBytes; i += 64)
        __builtin_prefetch(w[p] + (int64_t)k * E::kBytes + kAhead + i, 0, 3);
#pragma GCC unroll 4
    for (int i = 0; i < kStep; i++) step(k + i);
  }
  for (; k < inputs; k++) step(k);
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) {
      float* to = totals + (r * P + p) * kPanel;
      store(to, fresh ? sums[p][r][0] : load(to) + sums[p][r][0]);
      store(to + W, fresh ? sums[p][r][1] : load(to + W) + sums[p][r][1]);
    }
}

template <class E, int R>
inline void chains(const char* const* w, const float* x, int inputs, float* totals, bool fresh, int panels) {
  if (panels == 1) chain<E, R, 1>(w, x, inputs, totals, fresh);
  else if constexpr (R == 1 || (R == 2 && W == 16)) {
    if (panels == 2) chain<E, R, 2>(w, x, inputs, totals, fresh);
    else if (panels == 3) chain<E, R, 3>(w, x, inputs, totals, fresh);
    else chain<E, R, 4>(w, x, inputs, totals, fresh);
  } else {
    // Rows that fill the registers by themselves take panels one by one.
    alignas(64) float part[R * kPanel];
    for (int p = 0; p < panels; p++) {
      if (!fresh)
        for (int r = 0; r < R; r++)
          std::memcpy(part + r * kPanel, totals + (r * panels + p) * kPanel, sizeof(float) * kPanel);
      chain<E, R, 1>(w + p, x, inputs, part, fresh);
      for (int r = 0; r < R; r++)
        std::memcpy(totals + (r * panels + p) * kPanel, part + r * kPanel, sizeof(float) * kPanel);
    }
  }
}

template <class E>
inline void chain_rows(const char* const* w, const float* x, int rows, int inputs, float* totals, bool fresh,
                       int panels) {
#define OCTAVO_ROWS(n) \
  case n: return chains<E, n>(w, x, inputs, totals, fresh, panels);
  switch (rows) {
    OCTAVO_ROWS(1) OCTAVO_ROWS(2) OCTAVO_ROWS(3) OCTAVO_ROWS(4) OCTAVO_ROWS(5) OCTAVO_ROWS(6)
#if defined(OCTAVO_AVX512)
    OCTAVO_ROWS(7) OCTAVO_ROWS(8) OCTAVO_ROWS(9) OCTAVO_ROWS(10) OCTAVO_ROWS(11) OCTAVO_ROWS(12)
#endif
  }
#undef OCTAVO_ROWS
}

template <class E>
inline void widen_panel(float* to, const char* from, int inputs) {
  for (int k = 0; k < inputs; k++) {
    vf a, b;
    E::load(from + (int64_t)k * E::kBytes, a, b);
    store(to + k * kPanel, a);
    store(to + k * kPanel + W, b);
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

inline Best best_of(const float* row, int n, int64_t first) {
  Best best{row[0], static_cast<int32_t>(first)};
  for (int i = 1; i < n && best.value == best.value; i++)
    if (!(row[i] <= best.value)) best = {row[i], static_cast<int32_t>(first + i)};
  return best;
}

// One row of one panel: scaled, biased, and stored or searched.
inline void deliver_row(const Product& c, float* row, int64_t r, int64_t panel) {
  const Panels& m = *c.panels;
  const int64_t first = panel * kPanel;
  const int n = static_cast<int>(m.outputs - first < kPanel ? m.outputs - first : kPanel);
  for (int i = 0; i < kPanel; i += W) {
    vf x = load(row + i);
    if (m.scales) x = x * load(m.scales + first + i);
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
  c.best[panel * c.rows + r] = best_of(row, n, first);
}

// ---- a work item ----

constexpr int kMostPanels = 4;

size_t scratch(const Product& c) {
  size_t rows = 0;
  for (int t = 0; t < c.count; t++) rows += c.tiles[t].rows;
  return rows * kPanel * kMostPanels + (size_t)kDepth * kPanel;
}

template <class E>
void multiply_as(const Product& c, int64_t panel, int panels, float* scratch) {
  const Panels& m = *c.panels;
  float* wide = scratch;
  float* totals = scratch + (size_t)kDepth * kPanel;
  const bool widen = E::kBytes != PairF32::kBytes && c.count >= kWidenTiles && panels == 1;
  for (int64_t k = 0; k < m.inputs; k += kDepth) {
    const int inputs = static_cast<int>(m.inputs - k < kDepth ? m.inputs - k : kDepth);
    const char* w[kMostPanels];
    for (int p = 0; p < panels; p++) w[p] = m.weights + (panel + p) * m.panel_bytes + k * E::kBytes;
    if (widen) widen_panel<E>(wide, w[0], inputs);
    const char* const same[1] = {reinterpret_cast<const char*>(wide)};
    float* to = totals;
    for (int t = 0; t < c.count; t++) {
      const Tile& tile = c.tiles[t];
      const float* x = tile.x + k * tile.rows;
      if (widen) chain_rows<PairF32>(same, x, tile.rows, inputs, to, k == 0, 1);
      else chain_rows<E>(w, x, tile.rows, inputs, to, k == 0, panels);
      to += (size_t)tile.rows * panels * kPanel;
    }
  }
  float* row = totals;
  for (int t = 0; t < c.count; t++)
    for (int r = 0; r < c.tiles[t].rows; r++)
      for (int p = 0; p < panels; p++, row += kPanel) deliver_row(c, row, c.tiles[t].first + r, panel + p);
}

void multiply(const Product& c, int64_t panel, int panels, float* scratch) {
  if (c.panels->dtype == Dtype::f32) multiply_as<PairF32>(c, panel, panels, scratch);
  else if (c.panels->dtype == Dtype::bf16) multiply_as<PairBF16>(c, panel, panels, scratch);
  else if (c.panels->dtype == Dtype::f16) multiply_as<PairF16>(c, panel, panels, scratch);
  else multiply_as<PairI8>(c, panel, panels, scratch);
}

}  // namespace
}  // namespace OCTAVO_ISA

namespace linear {
#define OCTAVO_TEXT(x) #x
#define OCTAVO_NAME(x) OCTAVO_TEXT(x)
extern const LinearKernels OCTAVO_TABLE = {OCTAVO_NAME(OCTAVO_ISA), OCTAVO_ISA::kPanel,   OCTAVO_ISA::kTile,
                                           OCTAVO_ISA::bytes,       OCTAVO_ISA::pack,     OCTAVO_ISA::gather,
                                           OCTAVO_ISA::scratch,     OCTAVO_ISA::multiply};
}  // namespace linear
}  // namespace octavo
