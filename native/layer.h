// The small operations of a decoder layer, each over some rows: residual sums and norms, rope and the writing of keys
// and values, activation times gate. Arithmetic is float32; results are rounded to the rows' type where Transformers
// rounds them. Plain values and addresses: nothing here owns memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace octavo {

// x / rms(x) * weight, or (x - mean) / deviation * weight + bias where it is centred.
struct Norm {
  const float* weight;   // [width], or [heads][width] where every head has its own; null: ones
  const float* bias;     // null: none
  int width;             // elements that are normalised together
  int64_t weight_head;   // elements from one head's weights to the next one's; 0: all share them
  float eps;
  bool centred;
  bool rounds;           // to the rows' type, before the weight is multiplied in
};

// sum = x + by * before(delta) + by * second, and out = after(sum). Rows are `width` elements, side by side.
// by_first: the product with `by` is rounded before it is added.
struct Residual {
  Dtype dtype;
  int width;
  const char* x;
  const char* delta;    // null: nothing is added
  const char* second;   // null: nothing more is added
  const Norm* before;   // null: delta as it is
  float by;
  char* sum;            // null: the sum is not wanted
  const Norm* after;    // null: the sum alone is wanted
  char* out;
};

enum class Rope : int {
  none = 0,
  halves = 1,       // element i is turned with element i + rotary / 2
  pairs = 2,        // elements 2 i and 2 i + 1 are turned together, by entry 2 i of the tables
  pairs_packed = 3,   // likewise, by entry i of the tables
  halves_packed = 4   // as halves, both by entry i of the tables
};

// Rows of [query heads | key heads | value heads]: queries and keys are normalised and turned in place, keys and
// values go to their pages. Without queries rows begin with their keys; without `blocks` queries alone are touched.
struct Turn {
  const Pages* pages;
  Dtype dtype;
  char* rows;
  int64_t row;          // elements from one row to the next
  int q_heads;
  const Norm* q_norm;   // null: none
  const Norm* k_norm;
  Rope rope;
  int rotary;           // leading elements of a head that are turned
  Dtype table;          // type of cosines and sines
  const char* cos;
  const char* sin;
  int64_t table_row;    // elements from one row of the tables to the next one
  const int64_t* positions;  // of each token: its row in the tables; null: token t has row t
  bool rounds;          // products are rounded before they are added
  const int64_t* blocks;
  const int64_t* offsets;
};

// out = act(rows[.. width)) * rows[width .. 2 width), or the activation alone where there is no gate.
struct Gate {
  Act act;
  Dtype dtype;
  bool gated;
  int width;
  const char* rows;
  char* out;
};

// What one instruction set does, over rows first .. last - 1; `scratch` has as many floats as it asks for.
struct LayerKernels {
  const char* name;
  size_t (*residual_scratch)(const Residual&);
  void (*residual)(const Residual&, int64_t first, int64_t last, float* scratch);
  size_t (*turn_scratch)(const Turn&);
  void (*turn)(const Turn&, int64_t first, int64_t last, float* scratch);
  void (*gate)(const Gate&, int64_t first, int64_t last);
};

// Those that run on this processor, the fastest first.
const std::vector<const LayerKernels*>& layer_kernels();

// All rows, on as many threads as they are worth.
void run_residual(const LayerKernels&, const Residual&, int64_t rows, int threads);
void run_turn(const LayerKernels&, const Turn&, int64_t rows, int threads);
void run_gate(const LayerKernels&, const Gate&, int64_t rows, int threads);

}  // namespace octavo
