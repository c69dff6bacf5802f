// The kernels of one instruction set. Compiled once for each: OCTAVO_ISA names it, OCTAVO_AVX512 or OCTAVO_AVX2 says
// which intrinsics there are (neither: portable, any processor).
#include "few.h"
#include "many.h"
#include "pairs.h"
#include "put.h"

namespace octavo {
namespace OCTAVO_ISA {
namespace {

size_t scratch_floats(const Call& c, int few_rows, int many_rows) {
  const size_t few = few_rows ? Few::floats(c, few_rows) : 0, many = many_rows ? Many::floats(c, many_rows) : 0;
  return few > many ? few : many;
}

size_t partial_floats(const Call& c) { return padded(c.pages->v_dim) + 2; }

template <class E>
void attend_as(const Call& c, const Item* items, const Task& task, int head, float* scratch) {
  const Item& first = items[task.first];
  if (first.count * c.group <= kFewRows) attend_few<E>(c, &first, task, head, scratch);
  else attend_many<E>(c, first, head, scratch);
}

#if defined(OCTAVO_AVX512)
void attend_in_pairs(const Call& c, const Item* items, const Task& task, int head, float* scratch) {
  const Pages& pages = *c.pages;
  const Item& first = items[task.first];
  if (first.count * c.group > kFewRows) {
    if (pages.k_dim % 2 == 0) return attend_pairs(c, first, head, scratch);
  } else if (pages.k_dim % kWoven == 0 && pages.v_dim % kWoven == 0) {
    return attend_few<Pairs>(c, &first, task, head, scratch);
  }
  attend_as<BF16>(c, items, task, head, scratch);
}
#endif

void attend(const Call& c, const Item* items, const Task& task, int head, float* scratch) {
#if defined(OCTAVO_AVX512)
  if (c.dots) return attend_in_pairs(c, items, task, head, scratch);
#endif
  if (c.pages->dtype == Dtype::f32) attend_as<F32>(c, items, task, head, scratch);
  else if (c.pages->dtype == Dtype::bf16) attend_as<BF16>(c, items, task, head, scratch);
  else if (c.pages->dtype == Dtype::f16) attend_as<F16>(c, items, task, head, scratch);
  else if (c.pages->dtype == Dtype::i8) attend_as<I8>(c, items, task, head, scratch);
  else attend_as<E4M3>(c, items, task, head, scratch);
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
