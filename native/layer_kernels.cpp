// The small operations of a decoder layer for one instruction set; see layer.h.
#include "layer.h"

#include "activations.h"
#include "put.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

// ---- rounding to an element type ----

template <class E>
OCTAVO_INLINE vf rounded(vf x) {
  alignas(64) typename E::T lanes[W];
  E::store(lanes, x);
  return E::load(lanes);
}
template <>
OCTAVO_INLINE vf rounded<F32>(vf x) {
  return x;
}
template <>
OCTAVO_INLINE vf rounded<BF16>(vf x) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)x)), 16);
#else
  vu bits = (vu)x;
  vu near = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return (vf)((x == x) ? near : bits);
#endif
}

template <class E>
OCTAVO_INLINE void round_row(float* row, int n) {
  if (sizeof(typename E::T) == 4) return;
  for (int i = 0; i < n; i += W) store(row + i, rounded<E>(load(row + i)));
}

// The lanes of the last vector that lie behind n elements become zero.
OCTAVO_INLINE void zero_tail(float* row, int n) {
  for (int i = n; i < padded(n); i++) row[i] = 0;
}

// ---- norms ----

// `row` has `norm.width` elements and zeros up to whole vectors. Four sums side by side, added in a fixed order.
template <class E>
inline void normalise(float* row, const Norm& norm, const float* weight) {
  const int n = norm.width, end = padded(n);
  float mean = 0;
  if (norm.centred) {
    vf sums[4] = {};
    for (int i = 0, j = 0; i < end; i += W, j = (j + 1) & 3) sums[j] += load(row + i);
    mean = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / n;
    for (int i = 0; i < end; i += W) store(row + i, load(row + i) - splat(mean));
    zero_tail(row, n);
  }
  vf squares[4] = {};
  int i = 0;
  for (; i + 4 * W <= end; i += 4 * W) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      vf x = load(row + i + j * W);
      squares[j] = fma(x, x, squares[j]);
    }
  }
  for (; i < end; i += W) {
    vf x = load(row + i);
    squares[0] = fma(x, x, squares[0]);
  }
  const float by = 1.0f / std::sqrt(sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / n + norm.eps);
  for (i = 0; i + W <= n; i += W) {
    vf x = load(row + i) * splat(by);
    if (norm.rounds) x = rounded<E>(x);
    if (weight) x *= load(weight + i);
    if (norm.bias) x += load(norm.bias + i);
    store(row + i, rounded<E>(x));
  }
  if (i < n) {
    vf x = load(row + i) * splat(by);
    if (norm.rounds) x = rounded<E>(x);
    if (weight) x *= load_some<F32>(weight + i, n - i);
    if (norm.bias) x += load_some<F32>(norm.bias + i, n - i);
    store(row + i, rounded<E>(x));
    zero_tail(row, n);
  }
}

// ---- residual ----

size_t residual_scratch(const Residual& w) { return 2 * (size_t)padded(w.width); }

template <class E>
OCTAVO_INLINE vf load_at(const typename E::T* p, int i, int n) {
  return i + W <= n ? E::load(p + i) : load_some<E>(p + i, n - i);
}
template <class E>
OCTAVO_INLINE void store_at(typename E::T* p, vf x, int i, int n) {
  if (i + W <= n) E::store(p + i, x);
  else store_some<E>(p + i, x, n - i);
}

template <class E>
void residual_as(const Residual& w, int64_t first, int64_t last, float* scratch) {
  using T = typename E::T;
  const int n = w.width, end = padded(n);
  float* row = scratch;
  float* added = scratch + end;
  for (int64_t r = first; r < last; r++) {
    const T* x = reinterpret_cast<const T*>(w.x) + r * n;
    const T* delta = reinterpret_cast<const T*>(w.delta) + r * n;
    const T* second = reinterpret_cast<const T*>(w.second) + r * n;
    if (w.delta && w.before) {
      for (int i = 0; i < end; i += W) store(added + i, load_at<E>(delta, i, n));
      normalise<E>(added, *w.before, w.before->weight);
    }
    for (int i = 0; i < end; i += W) {
      vf total = load_at<E>(x, i, n);
      if (w.delta) {
        vf d = w.before ? load(added + i) : load_at<E>(delta, i, n);
        if (w.by != 1.0f) d = rounded<E>(d * splat(w.by));
        if (w.second) {
          vf other = load_at<E>(second, i, n);
          if (w.by != 1.0f) other = rounded<E>(other * splat(w.by));
          d = rounded<E>(d + other);
        }
        total = rounded<E>(total + d);
      }
      store(row + i, total);
    }
    if (w.sum) {
      T* to = reinterpret_cast<T*>(w.sum) + r * n;
      for (int i = 0; i < end; i += W) store_at<E>(to, load(row + i), i, n);
    }
    if (w.after) {
      T* to = reinterpret_cast<T*>(w.out) + r * n;
      normalise<E>(row, *w.after, w.after->weight);
      for (int i = 0; i < end; i += W) store_at<E>(to, load(row + i), i, n);
    }
  }
}

void residual(const Residual& w, int64_t first, int64_t last, float* scratch) {
  if (w.dtype == Dtype::f32) residual_as<F32>(w, first, last, scratch);
  else if (w.dtype == Dtype::bf16) residual_as<BF16>(w, first, last, scratch);
  else residual_as<F16>(w, first, last, scratch);
}

// ---- rope ----

int head_dim(const Turn& w) { return w.pages->k_dim; }

int most_heads(const Turn& w) { return larger(w.q_heads, w.pages->kv_heads); }

// The heads of one row, the tables of one token, and what is normalised together with padding.
size_t turn_scratch(const Turn& w) {
  return 2 * (size_t)padded(most_heads(w) * head_dim(w)) + 2 * padded(w.rotary) + 4 * W;
}

template <class E>
OCTAVO_INLINE vf turned(vf a, vf c, vf b, vf s, bool rounds) {  // a c + b s
  if (rounds) return rounded<E>(a * c) + rounded<E>(b * s);
  return fma(a, c, b * s);
}

// One head of floats in place. Where a table has both halves, each half uses its own.
template <class E>
inline void turn_head(const Turn& w, float* head, const float* cos, const float* sin) {
  const int half = w.rotary / 2;
  if (w.rope == Rope::halves || w.rope == Rope::halves_packed) {
    const int other = w.rope == Rope::halves ? half : 0;
    int i = 0;
    for (; i + W <= half; i += W) {
      vf a = load(head + i), b = load(head + half + i);
      store(head + i, rounded<E>(turned<E>(a, load(cos + i), -b, load(sin + i), w.rounds)));
      store(head + half + i, rounded<E>(turned<E>(b, load(cos + other + i), a, load(sin + other + i), w.rounds)));
    }
    for (; i < half; i += W) {
      const int n = half - i;
      vf a = load_some<F32>(head + i, n), b = load_some<F32>(head + half + i, n);
      vf low = turned<E>(a, load_some<F32>(cos + i, n), -b, load_some<F32>(sin + i, n), w.rounds);
      vf high = turned<E>(b, load_some<F32>(cos + other + i, n), a, load_some<F32>(sin + other + i, n), w.rounds);
      store_some<F32>(head + i, rounded<E>(low), n);
      store_some<F32>(head + half + i, rounded<E>(high), n);
    }
    return;
  }
  const bool packed = w.rope == Rope::pairs_packed;
  for (int i = 0; i < half; i++) {
    const int low = packed ? i : 2 * i, high = packed ? i : 2 * i + 1;
    float a = head[2 * i], b = head[2 * i + 1];
    vf pair = {}, other = {}, c = {}, s = {};
    pair[0] = a, pair[1] = b;
    other[0] = -b, other[1] = a;
    c[0] = cos[low], c[1] = cos[high];
    s[0] = sin[low], s[1] = sin[high];
    vf made = rounded<E>(turned<E>(pair, c, other, s, w.rounds));
    head[2 * i] = made[0];
    head[2 * i + 1] = made[1];
  }
}

template <class E>
inline void norm_heads(float* all, int heads, int dim, const Norm* norm, float* one) {
  if (!norm) return;
  const int runs = heads * dim / norm->width;
  for (int h = 0; h < runs; h++) {
    float* head = all + (int64_t)h * norm->width;
    const float* weight = norm->weight ? norm->weight + h * norm->weight_head : nullptr;
    if (norm->width % W == 0) {
      normalise<E>(head, *norm, weight);
      continue;
    }
    std::memcpy(one, head, sizeof(float) * norm->width);  // heads lie close, and padding would run into the next
    zero_tail(one, norm->width);
    normalise<E>(one, *norm, weight);
    std::memcpy(head, one, sizeof(float) * norm->width);
  }
}

template <class E>
OCTAVO_INLINE void widen_row(float* to, const char* from, int n) {
  const typename E::T* p = reinterpret_cast<const typename E::T*>(from);
  int i = 0;
  for (; i + W <= n; i += W) store(to + i, E::load(p + i));
  for (; i < n; i += W) store_some<F32>(to + i, load_some<E>(p + i, n - i), n - i);
}
template <class E>
OCTAVO_INLINE void narrow_row(char* to, const float* from, int n) {
  typename E::T* p = reinterpret_cast<typename E::T*>(to);
  int i = 0;
  for (; i + W <= n; i += W) E::store(p + i, load(from + i));
  if (i < n) store_some<E>(p + i, load_some<F32>(from + i, n - i), n - i);
}

void widen_table(Dtype dtype, float* to, const char* from, int n) {
  if (dtype == Dtype::f32) widen_row<F32>(to, from, n);
  else if (dtype == Dtype::bf16) widen_row<BF16>(to, from, n);
  else widen_row<F16>(to, from, n);
}

template <class E>
void turn_as(const Turn& w, int64_t first, int64_t last, float* scratch) {
  const Pages& pages = *w.pages;
  const int dim = head_dim(w), q_all = w.q_heads * dim, k_all = pages.kv_heads * dim;
  const int64_t size = sizeof(typename E::T);
  float* heads = scratch;
  float* cos = heads + (int64_t)most_heads(w) * dim + W;
  float* sin = cos + padded(w.rotary) + W;
  float* one = sin + padded(w.rotary) + W;
  for (int64_t t = first; t < last; t++) {
    char* row = w.rows + t * w.row * size;
    if (w.rope != Rope::none) {
      const int64_t at = (w.positions ? w.positions[t] : t) * w.table_row * size_of(w.table);
      const int entries = w.rope >= Rope::pairs_packed ? w.rotary / 2 : w.rotary;
      widen_table(w.table, cos, w.cos + at, entries);
      widen_table(w.table, sin, w.sin + at, entries);
    }
    for (int part = 0; part < (w.blocks ? 2 : 1); part++) {
      const Norm* norm = part ? w.k_norm : w.q_norm;
      if (w.rope == Rope::none && !norm) continue;
      const int count = part ? pages.kv_heads : w.q_heads;
      char* at = row + (part ? q_all * size : 0);
      widen_row<E>(heads, at, count * dim);
      norm_heads<E>(heads, count, dim, norm, one);
      if (w.rope != Rope::none)
        for (int h = 0; h < count; h++) turn_head<E>(w, heads + h * dim, cos, sin);
      narrow_row<E>(at, heads, count * dim);
    }
    if (!w.blocks) continue;
    char* k = const_cast<char*>(pages.k) + w.blocks[t] * pages.unit_bytes + w.offsets[t] * pages.k_token_bytes;
    char* v = const_cast<char*>(pages.v) + w.blocks[t] * pages.unit_bytes + w.offsets[t] * pages.v_token_bytes;
    int64_t scale = w.blocks[t] * pages.unit_bytes + w.offsets[t] * pages.scale_token_bytes;
    const char* from_k = row + q_all * size;
    const char* from_v = from_k + k_all * size;
    for (int h = 0; h < pages.kv_heads; h++, scale += pages.scale_head_bytes) {
      put_row(pages, k + h * pages.k_head_bytes, pages.k_scales, scale, w.dtype, from_k + h * dim * size, dim);
      put_row(pages, v + h * pages.v_head_bytes, pages.v_scales, scale, w.dtype, from_v + h * pages.v_dim * size,
              pages.v_dim);
    }
  }
}

void turn(const Turn& w, int64_t first, int64_t last, float* scratch) {
  if (w.dtype == Dtype::f32) turn_as<F32>(w, first, last, scratch);
  else if (w.dtype == Dtype::bf16) turn_as<BF16>(w, first, last, scratch);
  else turn_as<F16>(w, first, last, scratch);
}

// ---- activations ----

template <class E, Act A>
void gate_with(const Gate& w, int64_t first, int64_t last) {
  using T = typename E::T;
  const int n = w.width;
  for (int64_t r = first; r < last; r++) {
    const T* row = reinterpret_cast<const T*>(w.rows) + r * n * (w.gated ? 2 : 1);
    T* to = reinterpret_cast<T*>(w.out) + r * n;
    for (int i = 0; i < n; i += W) {
      vf x = activated<A>(load_at<E>(row, i, n));
      if (w.gated) x = rounded<E>(x) * load_at<E>(row + n, i, n);
      store_at<E>(to, x, i, n);
    }
  }
}

template <class E>
void gate_as(const Gate& w, int64_t first, int64_t last) {
  if (w.act == Act::silu) gate_with<E, Act::silu>(w, first, last);
  else if (w.act == Act::gelu) gate_with<E, Act::gelu>(w, first, last);
  else if (w.act == Act::gelu_tanh) gate_with<E, Act::gelu_tanh>(w, first, last);
  else if (w.act == Act::relu) gate_with<E, Act::relu>(w, first, last);
  else gate_with<E, Act::relu_squared>(w, first, last);
}

void gate(const Gate& w, int64_t first, int64_t last) {
  if (w.dtype == Dtype::f32) gate_as<F32>(w, first, last);
  else if (w.dtype == Dtype::bf16) gate_as<BF16>(w, first, last);
  else gate_as<F16>(w, first, last);
}

}  // namespace
}  // namespace OCTAVO_ISA

namespace layer {
#define OCTAVO_TEXT(x) #x
#define OCTAVO_NAME(x) OCTAVO_TEXT(x)
extern const LayerKernels OCTAVO_TABLE = {
    OCTAVO_NAME(OCTAVO_ISA), OCTAVO_ISA::residual_scratch, OCTAVO_ISA::residual,
    OCTAVO_ISA::turn_scratch, OCTAVO_ISA::turn,            OCTAVO_ISA::gate};
}  // namespace layer
}  // namespace octavo
