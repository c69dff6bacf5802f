// The kernels of one instruction set. Compiled once for each: OCTAVO_ISA names it, OCTAVO_AVX512 or OCTAVO_AVX2 says
// which intrinsics there are (neither: portable, any processor).
#include "few.h"
#include "many.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

size_t scratch_floats(const Call& c, int rows) { return rows <= kFewRows ? few_scratch(c) : Many::floats(c, rows); }

size_t partial_floats(const Call& c) { return padded(c.pages->v_dim) + 2; }

template <class E>
void attend_as(const Call& c, const Item& it, int head, float* scratch) {
  if (it.count * c.group <= kFewRows) attend_few<E>(c, it, head, scratch);
  else attend_many<E>(c, it, head, scratch);
}

void attend(const Call& c, const Item& it, int head, float* scratch) {
  if (c.pages->dtype == Dtype::f32) attend_as<F32>(c, it, head, scratch);
  else if (c.pages->dtype == Dtype::bf16) attend_as<BF16>(c, it, head, scratch);
  else if (c.pages->dtype == Dtype::f16) attend_as<F16>(c, it, head, scratch);
  else if (c.pages->dtype == Dtype::i8) attend_as<I8>(c, it, head, scratch);
  else attend_as<E4M3>(c, it, head, scratch);
}

void put(Dtype to_type, char* to, Dtype from_type, const char* from, int n) {
  if (to_type == from_type) {
    std::memcpy(to, from, n * size_of(to_type));
    return;
  }
  alignas(64) float row[kMostDim + W];
  widen_any(from_type, row, from, n, 1.0f);
  narrow_any(to_type, to, row, n, 1.0f);
}

// A row in eight bits and its scale, as octavo/kernels/quantise.py has them.
template <class E>
void put_scaled(char* to, float* scale, const float* row, int n) {  // row is padded with zeros
  float largest_size = 0;
  bool whole = true;
  for (int i = 0; i < n; i++) {
    float size = row[i] < 0 ? -row[i] : row[i];
    whole = whole && size == size;
    largest_size = size > largest_size ? size : largest_size;
  }
  float by = whole ? largest_size / E::kLargest : __builtin_nanf("");
  if (by < 0x1p-126f) by = 0x1p-126f;
  *scale = by;
  typename E::T* p = reinterpret_cast<typename E::T*>(to);
  int i = 0;
  for (; i + W <= n; i += W) E::store(p + i, load(row + i) / splat(by));
  if (i < n) store_some<E>(p + i, load(row + i) / splat(by), n - i);
}

void put_row(const Pages& pages, char* to, const char* scales, int64_t at, Dtype from_type, const char* from, int n) {
  if (!quantised(pages.dtype)) return put(pages.dtype, to, from_type, from, n);
  alignas(64) float row[kMostDim + W];
  widen_any(from_type, row, from, n, 1.0f);
  float* scale = reinterpret_cast<float*>(const_cast<char*>(scales) + at);
  if (pages.dtype == Dtype::i8) put_scaled<I8>(to, scale, row, n);
  else put_scaled<E4M3>(to, scale, row, n);
}

void write(const Write& w, int64_t first, int64_t last) {
  const Pages& pages = *w.pages;
  const int64_t size = size_of(w.dtype);
  for (int64_t t = first; t < last; t++) {
    char* k = const_cast<char*>(pages.k) + w.blocks[t] * pages.unit_bytes + w.offsets[t] * pages.k_token_bytes;
    char* v = const_cast<char*>(pages.v) + w.blocks[t] * pages.unit_bytes + w.offsets[t] * pages.v_token_bytes;
    int64_t scale = w.blocks[t] * pages.unit_bytes + w.offsets[t] * pages.scale_token_bytes;
    const char* from_k = w.k + t * w.k_token * size;
    const char* from_v = w.v + t * w.v_token * size;
    for (int h = 0; h < pages.kv_heads; h++, scale += pages.scale_head_bytes) {
      put_row(pages, k + h * pages.k_head_bytes, pages.k_scales, scale, w.dtype, from_k + h * w.k_head * size, pages.k_dim);
      put_row(pages, v + h * pages.v_head_bytes, pages.v_scales, scale, w.dtype, from_v + h * w.v_head * size, pages.v_dim);
    }
  }
}

}  // namespace
}  // namespace OCTAVO_ISA

#define OCTAVO_TEXT(x) #x
#define OCTAVO_NAME(x) OCTAVO_TEXT(x)
extern const Kernels OCTAVO_TABLE = {OCTAVO_NAME(OCTAVO_ISA), OCTAVO_ISA::scratch_floats, OCTAVO_ISA::partial_floats,
                                     OCTAVO_ISA::attend, OCTAVO_ISA::write};

}  // namespace octavo
