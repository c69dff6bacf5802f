// What crosses from the caller to the kernels: pages, a step's plan, one call. Plain values and addresses;
// nothing here owns memory, and nothing knows Python or an instruction set.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace octavo {

enum class Dtype : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3, e4m3 = 4, i4 = 5 };  // i4: packed weights alone

constexpr bool quantised(Dtype dtype) { return dtype >= Dtype::i8; }
constexpr int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : quantised(dtype) ? 1 : 2; }

constexpr int kMostDim = 1024;     // of a key or a value
constexpr int kKeyTile = 64;      // keys that are scored together
constexpr int kPairTile = 128;    // and where many rows meet keys and values of bfloat16 as pairs
constexpr int kFewRows = 8;       // query rows (positions x heads of a group) up to which keys are read in place
constexpr int kTogetherRows = 48; // such rows of several chunks that may read the keys of a shared block together
constexpr int kTileRows = 192;    // query rows of a tile of a longer chunk, at least one position
constexpr int kShortSegment = 512;   // keys of one work item when a chunk is short
constexpr int kLongSegment = 4096;   // and when it has many rows, whose partial results weigh more
constexpr int kShortRows = 64;       // rows of a whole chunk that count as short

// One layer's keys and values. Position t of a sequence is at
// base + units[t / block_tokens] * unit_bytes + head * head_bytes + (t % block_tokens) * token_bytes,
// and likewise the float32 scale of a quantised row.
struct Pages {
  Dtype dtype;
  const char* k;
  const char* v;
  int64_t units;
  int64_t unit_bytes;
  int64_t k_head_bytes, k_token_bytes;
  int64_t v_head_bytes, v_token_bytes;
  int kv_heads, block_tokens, k_dim, v_dim;
  const char* k_scales;  // null: not quantised
  const char* v_scales;
  int64_t scale_head_bytes, scale_token_bytes;
};

// Queries `first .. first + count - 1` (packed tokens) of one chunk, over keys `key_lo .. key_hi - 1`.
struct Item {
  const int32_t* table;
  int64_t first;
  int position;  // of the first query
  int count;
  int key_lo, key_hi;
  int tile;      // which tile of queries, counted over the plan
  int segment, segments;
  int64_t partial;  // where this item's partial results lie, in rows over all heads; unused with one segment
};

// Items that one thread takes: one, or several of few rows whose keys up to `together` lie in the same places.
struct Task {
  int64_t first;  // of the plan's items
  int count;
  int together;  // the key from which each of several items goes on alone
};

// Which keys a query at position p sees: first_key(p) .. p.
struct Sight {
  int window;  // 0: none
  int chunk;   // 0: none
  int first_key(int p) const {
    int low = 0;
    if (window > 0 && p - window + 1 > low) low = p - window + 1;
    if (chunk > 0 && p - p % chunk > low) low = p - p % chunk;
    return low;
  }
};

// One layer's attention over a plan.
struct Call {
  const Pages* pages;
  Sight sight;
  int group;  // query heads that share a key head
  Dtype dtype;  // of queries and output
  const char* q;
  int64_t q_token, q_head;  // strides in elements
  char* out;
  int64_t out_token, out_head;
  float scale;
  float softcap;       // 0: none
  const float* sinks;  // one logit per query head, or null
  bool dots;           // queries and pages are bfloat16, and the processor's dots of its pairs are the faster way
  float* partials;
  std::atomic<int>* arrived;  // per (tile, kv head): segments that are done
};

struct Write {
  const Pages* pages;
  Dtype dtype;  // of k and v
  const char* k;
  int64_t k_token, k_head;  // strides in elements
  const char* v;
  int64_t v_token, v_head;
  const int64_t* blocks;
  const int64_t* offsets;
};

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  size_t (*scratch_floats)(const Call&, int few_rows, int many_rows);  // rows of a task at most
  size_t (*partial_floats)(const Call&);  // per row
  void (*attend)(const Call&, const Item* items, const Task&, int kv_head, float* scratch);
  void (*write)(const Write&, int64_t first, int64_t last);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

// What a gate is activated by.
enum class Act : int { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3, relu_squared = 4 };

}  // namespace octavo
