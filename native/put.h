// A row of numbers into pages of any element type: what writing keys and values, with rope or without, ends in.
#pragma once

#include "rows.h"

namespace octavo {
namespace OCTAVO_ISA {

inline void put(Dtype to_type, char* to, Dtype from_type, const char* from, int n) {
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
inline void put_scaled(char* to, float* scale, const float* row, int n) {  // row is padded with zeros
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

inline void put_row(const Pages& pages, char* to, const char* scales, int64_t at, Dtype from_type, const char* from,
                    int n) {
  if (!quantised(pages.dtype)) return put(pages.dtype, to, from_type, from, n);
  alignas(64) float row[kMostDim + W];
  widen_any(from_type, row, from, n, 1.0f);
  float* scale = reinterpret_cast<float*>(const_cast<char*>(scales) + at);
  if (pages.dtype == Dtype::i8) put_scaled<I8>(to, scale, row, n);
  else put_scaled<E4M3>(to, scale, row, n);
}

}  // namespace OCTAVO_ISA
}  // namespace octavo
