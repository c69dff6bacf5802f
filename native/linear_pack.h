// How weights and rows lie in memory for the linear kernels of one instruction set: packing and unpacking panels,
// gathering rows into tiles. Included once per instruction set, by linear_kernels.cpp.
// A panel is two vectors of outputs, its weights lie as [input][output]; a tile is some rows of inputs.
#pragma once

#include "linear.h"
#include "rows.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

constexpr int kPanel = 2 * W;
constexpr int kTile = W == 16 ? kMostTile : kMostTile / 2;
// Bytes of a panel that are asked for before they are used, into the second level: memory alone bounds few rows, and
// there a little ahead is best; more rows leave time, and what is far ahead comes while they are multiplied.
constexpr int ahead_of(int rows) { return rows <= 2 ? 2048 : rows <= 5 ? 1024 : 8192; }
constexpr int kWidenTiles = 3;
constexpr int kRowsOfMany = 2;  // rows up to which two panels are taken at once

// ---- how a panel's weights are stored: units of kInputs inputs, two vectors of outputs for each ----

struct PackF32 {
  using T = float;
  static constexpr int kInputs = 1;
  static OCTAVO_INLINE void load(const char* p, vf (&w)[kInputs][2]) {
    w[0][0] = OCTAVO_ISA::load(reinterpret_cast<const float*>(p));
    w[0][1] = OCTAVO_ISA::load(reinterpret_cast<const float*>(p) + W);
  }
};

struct PackBF16 {  // two inputs of an output in one 32-bit lane: a shift and a mask widen them, a dot takes them as is
  using T = uint16_t;
  static constexpr int kInputs = 2;
  static OCTAVO_INLINE void load(const char* p, vf (&w)[kInputs][2]) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      vu both = (vu)OCTAVO_ISA::load(reinterpret_cast<const int32_t*>(p) + v * W);
      w[0][v] = (vf)(both << 16);
      w[1][v] = (vf)(both & 0xffff0000u);
    }
  }
};

struct PackF16 {
  using T = uint16_t;
  static constexpr int kInputs = 1;
  static OCTAVO_INLINE void load(const char* p, vf (&w)[kInputs][2]) {
    w[0][0] = F16::load(reinterpret_cast<const uint16_t*>(p));
    w[0][1] = F16::load(reinterpret_cast<const uint16_t*>(p) + W);
  }
};

// Quantised weights lie in groups of kGroup inputs: the scales of the panel's outputs in float16, for four bits what
// 0 stands for likewise, then lanes of four inputs of an output, two vectors of outputs in turn. The lowest number is
// stored as 0.
struct GroupI8 {
  static constexpr bool kShifted = false;
  static constexpr int kHead = 2 * kPanel, kBytes = kHead + kPanel * kGroup, kOffset = 128;
  static OCTAVO_INLINE int place(int i) { return i / 4 * (4 * kPanel) + i % 4; }  // of input i, for output 0
  static void put(char* data, int i, int value) { data[place(i)] = static_cast<char>(value); }
  static int get(const char* data, int i) { return static_cast<uint8_t>(data[place(i)]); }
  static OCTAVO_INLINE vi lane(vi (*word)(const char*, int, int), const char* p, int i, int v) {
    return (word(p, i / 4, v) >> (8 * (i % 4))) & 255;
  }
};

struct GroupI4 {  // the low halves of the bytes are the group's first half
  static constexpr bool kShifted = true;
  static constexpr int kHead = 4 * kPanel, kBytes = kHead + kPanel * kGroup / 2, kOffset = 0, kHalf = kGroup / 2;
  static OCTAVO_INLINE int place(int i) { return i % kHalf / 4 * (4 * kPanel) + i % 4; }
  static void put(char* data, int i, int value) {
    char& byte = data[place(i)];
    byte = static_cast<char>(i < kHalf ? (byte & 0xf0) | value : (byte & 0x0f) | value << 4);
  }
  static int get(const char* data, int i) { return (data[place(i)] >> (i < kHalf ? 0 : 4)) & 15; }
  static OCTAVO_INLINE vi lane(vi (*word)(const char*, int, int), const char* p, int i, int v) {
    return (word(p, i % kHalf / 4, v) >> (8 * (i % 4) + (i < kHalf ? 0 : 4))) & 15;
  }
};

OCTAVO_INLINE vf scale_of(const char* group, int v) {
  return F16::load(reinterpret_cast<const uint16_t*>(group) + v * W);
}

OCTAVO_INLINE vf shift_of(const char* group, int v) { return scale_of(group + 2 * kPanel, v); }

OCTAVO_INLINE vi word_of(const char* data, int j, int v) {
  return load(reinterpret_cast<const int32_t*>(data) + (j * 2 + v) * W);
}

template <class E>
constexpr int kUnit = E::kInputs * kPanel * sizeof(typename E::T);  // bytes

template <class E>
int64_t bytes_as(int64_t inputs) {
  return (inputs + E::kInputs - 1) / E::kInputs * kUnit<E>;
}

int64_t bytes(Dtype dtype, int64_t inputs) {
  if (dtype == Dtype::f32) return bytes_as<PackF32>(inputs);
  if (dtype == Dtype::bf16) return bytes_as<PackBF16>(inputs);
  if (dtype == Dtype::f16) return bytes_as<PackF16>(inputs);
  return (inputs + kGroup - 1) / kGroup * (dtype == Dtype::i8 ? GroupI8::kBytes : GroupI4::kBytes);
}

template <class E>
void scatter(const Panels& m, int64_t output, const char* row) {
  typename E::T* to = reinterpret_cast<typename E::T*>(m.weights + output / kPanel * m.panel_bytes) +
                      output % kPanel * E::kInputs;
  const typename E::T* from = reinterpret_cast<const typename E::T*>(row);
  for (int64_t k = 0; k < m.inputs; k++) to[k / E::kInputs * (E::kInputs * kPanel) + k % E::kInputs] = from[k];
}

template <class G>
void scatter_groups(const Panels& m, int64_t output, const int8_t* row, const float* scales) {
  const int place = static_cast<int>(output % kPanel);
  char* group = m.weights + output / kPanel * m.panel_bytes;
  for (int64_t k = 0; k < m.inputs; k += kGroup, group += G::kBytes) {
    for (int part = 0; part <= G::kShifted; part++) {
      alignas(64) uint16_t lanes[W];
      F16::store(lanes, splat(*scales++));
      reinterpret_cast<uint16_t*>(group)[part * kPanel + place] = lanes[0];
    }
    char* data = group + G::kHead + place * 4;
    for (int i = 0; i < kGroup; i++) G::put(data, i, (k + i < m.inputs ? row[k + i] : 0) + G::kOffset);
  }
}

void pack(const Panels& m, int64_t output, Dtype from, const char* row, const float* scales, float* wide) {
  const int8_t* whole = reinterpret_cast<const int8_t*>(row);
  if (m.dtype == Dtype::i8) return scatter_groups<GroupI8>(m, output, whole, scales);
  if (m.dtype == Dtype::i4) return scatter_groups<GroupI4>(m, output, whole, scales);
  if (from != m.dtype) {
    widen_any(from, wide, row, static_cast<int>(m.inputs), 1.0f);
    row = reinterpret_cast<const char*>(wide);
    if (m.dtype != Dtype::f32) {
      char* narrowed = reinterpret_cast<char*>(wide + (m.inputs + W) / W * W);
      narrow_any(m.dtype, narrowed, wide, static_cast<int>(m.inputs), 1.0f);
      row = narrowed;
    }
  }
  if (m.dtype == Dtype::f32) scatter<PackF32>(m, output, row);
  else if (m.dtype == Dtype::bf16) scatter<PackBF16>(m, output, row);
  else scatter<PackF16>(m, output, row);
}

// One output's weights as they were packed, in float32.
template <class E>
void collect(const Panels& m, int64_t output, float* to) {
  const char* p = m.weights + output / kPanel * m.panel_bytes;
  const int place = static_cast<int>(output % kPanel);
  for (int64_t k = 0; k < m.inputs; k += E::kInputs, p += kUnit<E>) {
    vf w[E::kInputs][2];
    E::load(p, w);
    for (int i = 0; i < E::kInputs && k + i < m.inputs; i++) to[k + i] = w[i][place / W][place % W];
  }
}

template <class G>
void collect_groups(const Panels& m, int64_t output, float* to) {
  const char* group = m.weights + output / kPanel * m.panel_bytes;
  const int place = static_cast<int>(output % kPanel);
  for (int64_t k = 0; k < m.inputs; k += kGroup, group += G::kBytes) {
    const float scale = scale_of(group, place / W)[place % W];
    const float shift = G::kShifted ? shift_of(group, place / W)[place % W] : 0.0f;
    const char* data = group + G::kHead + place * 4;
    for (int i = 0; i < kGroup && k + i < m.inputs; i++)
      to[k + i] = scale * static_cast<float>(G::get(data, i) - G::kOffset) + shift;
  }
}

void unpack(const Panels& m, int64_t output, Dtype to_type, char* to, float* wide) {
  if (m.dtype == Dtype::f32) collect<PackF32>(m, output, wide);
  else if (m.dtype == Dtype::bf16) collect<PackBF16>(m, output, wide);
  else if (m.dtype == Dtype::f16) collect<PackF16>(m, output, wide);
  else if (m.dtype == Dtype::i8) collect_groups<GroupI8>(m, output, wide);
  else collect_groups<GroupI4>(m, output, wide);
  narrow_any(to_type, to, wide, static_cast<int>(m.inputs), 1.0f);
}

// Rows of inputs as float32, zeros behind them up to a whole run.
template <class E>
void gather_as(const char* x, int64_t x_stride, int rows, int64_t inputs, float* to) {
  for (int r = 0; r < rows; r++) {
    const typename E::T* p = reinterpret_cast<const typename E::T*>(x) + r * x_stride;
    float* run = to + r * kRun;
    for (int64_t k = 0; k < inputs; k += W) {
      alignas(64) float lanes[W];
      store(lanes, k + W <= inputs ? E::load(p + k) : load_some<E>(p + k, static_cast<int>(inputs - k)));
      for (int i = 0; i < W && k + i < inputs; i += kRun, run += kRun * rows)
        std::memcpy(run, lanes + i, kRun * sizeof(float));
    }
  }
}

// Rows of bfloat16 as they are, two inputs in one place of 32 bits. A line of every row in turn.
void gather_pairs(const char* x, int64_t x_stride, int rows, int64_t inputs, float* to) {
  constexpr int kBytes = kRun * sizeof(float), kLine = 64;
  const int64_t all = 2 * inputs, row = kBytes * rows;
  char* run = reinterpret_cast<char*>(to);
  int64_t at = 0;
  for (; at + kLine <= all; at += kLine, run += kLine / kBytes * row)
    for (int r = 0; r < rows; r++) {
      const char* p = x + r * x_stride * 2 + at;
#pragma GCC unroll 4
      for (int i = 0; i < kLine / kBytes; i++) std::memcpy(run + i * row + r * kBytes, p + i * kBytes, kBytes);
    }
  for (; at < all; at += kBytes, run += row)
    for (int r = 0; r < rows; r++) {
      const int64_t left = all - at < kBytes ? all - at : kBytes;
      if (left < kBytes) std::memset(run + r * kBytes, 0, kBytes);
      std::memcpy(run + r * kBytes, x + r * x_stride * 2 + at, left);
    }
}

OCTAVO_INLINE int32_t most_of(vi x) {
#if defined(OCTAVO_AVX512)
  return _mm512_reduce_max_epi32((__m512i)x);
#else
  int32_t most = x[0];
  for (int i = 1; i < W; i++) most = x[i] > most ? x[i] : most;
  return most;
#endif
}

// The quads of one group of one row in eight bits, then what is added for all weights that are stored too high (minus
// kOffset times their sum) or for what 0 stands for (the sum itself, scaled), then the scale.
template <class G>
OCTAVO_INLINE void quantise_group(const float* x, float* to) {
  vi most = vi{};  // the sizes of finite numbers are ordered as their bits are, and below those of all others
  for (int i = 0; i < kGroup; i += W) {
    vi bits = (vi)magnitude_of(load(x + i));
    most = bits > most ? bits : most;
  }
  const int32_t size = most_of(most);
  float scale;
  std::memcpy(&scale, &size, 4);
  scale /= I8::kLargest;
  if (size >= 0x7f800000) scale = __builtin_nanf("");
  else if (scale < 0x1p-100f) scale = 0x1p-100f;
  int8_t* bytes = reinterpret_cast<int8_t*>(to);
  int32_t total = 0;
  for (int i = 0; i < kGroup; i += W) I8::store(bytes + i, load(x + i) / splat(scale));
  for (int i = 0; i < kGroup; i++) total += bytes[i];
  if (G::kShifted) {
    to[kGroup / 4] = scale * static_cast<float>(total);
  } else {
    total *= -G::kOffset;
    std::memcpy(to + kGroup / 4, &total, 4);
  }
  to[kGroup / 4 + 1] = scale;
}

template <class E, class G>
void gather_quads(const char* x, int64_t x_stride, int rows, int64_t inputs, float* to) {
  for (int r = 0; r < rows; r++) {
    const typename E::T* p = reinterpret_cast<const typename E::T*>(x) + r * x_stride;
    float* run = to + r * kQuadRun;
    for (int64_t k = 0; k < inputs; k += kGroup, run += kQuadRun * rows) {
      alignas(64) float wide[kGroup] = {};
      const int n = static_cast<int>(inputs - k < kGroup ? inputs - k : kGroup);
      widen<E>(wide, reinterpret_cast<const char*>(p + k), n, splat(1.0f));
      quantise_group<G>(wide, run);
    }
  }
}

template <class E>
void gather_from(Form form, const char* x, int64_t x_stride, int rows, int64_t inputs, float* to) {
  if (form == Form::quads_i8) gather_quads<E, GroupI8>(x, x_stride, rows, inputs, to);
  else if (form == Form::quads_i4) gather_quads<E, GroupI4>(x, x_stride, rows, inputs, to);
  else gather_as<E>(x, x_stride, rows, inputs, to);
}

void gather(Form form, Dtype from, const char* x, int64_t x_stride, int rows, int64_t inputs, float* to) {
  if (form == Form::pairs) gather_pairs(x, x_stride, rows, inputs, to);
  else if (from == Dtype::f32) gather_from<F32>(form, x, x_stride, rows, inputs, to);
  else if (from == Dtype::bf16) gather_from<BF16>(form, x, x_stride, rows, inputs, to);
  else gather_from<F16>(form, x, x_stride, rows, inputs, to);
}

}  // namespace
}  // namespace OCTAVO_ISA
}  // namespace octavo
