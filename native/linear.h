// y = x W^T + bias for few rows: weights packed once in panels of outputs, sums in float32.
// Each output is one chain of multiply-adds over the inputs in order, restarted at every kDepth-th input, so a row's
// result depends on that row alone: neither on the rows beside it nor on how many threads there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "linear_memory.h"
#include "types.h"

namespace octavo {

constexpr int kDepth = 512;  // inputs of one chain
constexpr int kMostTile = 12;  // rows that are multiplied together, on any instruction set
constexpr int kGroup = 32;     // inputs that share a scale, of weights in int8 or int4 and of rows rounded for them
constexpr int kTileQuads = 6;  // such rows that are multiplied together

// One matrix in panels. Everything is in bytes of the packed form, which belongs to one instruction set.
struct Panels {
  Dtype dtype;
  int64_t outputs, inputs;
  char* weights;
  const float* bias;  // of each output, padded to whole panels; null where there is none
  int64_t panel_bytes;
};

// Rows in tiles: tile t has rows first .. first + rows - 1, and its inputs lie at `x`, some places of a row after the
// same ones of the row before: [places / kRun][row][kRun].
struct Tile {
  int64_t first;
  int rows;
  const float* x;
};

// The largest output so far: the lowest index of equals, a NaN before all.
struct Best {
  float value = -__builtin_huge_valf();
  int32_t index = INT32_MAX;
  void see(float one, int32_t at) {
    const bool nan = one != one, was = value != value;
    if (nan == was ? one > value || (!(one < value) && at < index) : nan) *this = {one, at};
  }
};

// How the inputs of a tile lie: as float32, as they came in pairs of bfloat16, or rounded to eight bits in groups.
enum class Form : int { floats, pairs, quads_i8, quads_i4 };

constexpr int kRun = 4;  // places of one row side by side
constexpr int kQuadRun = kGroup / 4 + 2;  // of eight-bit inputs: a group's, what their sums start from, and their scale

// Places of 32 bits that a row takes.
constexpr int64_t places(Form form, int64_t inputs) {
  if (form >= Form::quads_i8) return (inputs + kGroup - 1) / kGroup * kQuadRun;
  return ((form == Form::pairs ? (inputs + 1) / 2 : inputs) + kRun - 1) / kRun * kRun;
}

// One matrix times some rows, as a kernel sees it.
struct Product {
  const Panels* panels;
  Form form;
  const Tile* tiles;
  int count;
  char* out;  // or null: the best of each row is kept
  Dtype out_dtype;
  int64_t out_stride;  // in elements
  Best* best;          // of each row, among the panels that one share of the work has seen
  int64_t apart;       // from a panel of gates to that of what they are multiplied with; 0: nothing is gated
  Act act;
};

// What one instruction set does.
struct LinearKernels {
  const char* name;
  int panel;  // outputs of one
  int tile;   // rows that are multiplied together
  int rows_of_many;  // up to which two panels may be taken at once
  int64_t (*bytes)(Dtype dtype, int64_t inputs);  // of one panel
  // One output's weights, and for int8 and int4 the scales of its groups; `wide` has room for twice the inputs and two vectors.
  void (*pack)(const Panels&, int64_t output, Dtype from, const char* row, const float* scales, float* wide);
  void (*unpack)(const Panels&, int64_t output, Dtype to_type, char* to, float* wide);
  void (*gather)(Form form, Dtype from, const char* x, int64_t x_stride, int rows, int64_t inputs, float* to);
  size_t (*scratch)(const Product&);  // floats
  void (*multiply)(const Product&, int64_t panel, int panels, float* scratch);
};

// Kernels, and whether they use the processor's own dots. A set with dots that has none for some types is the set
// without them there.
struct LinearSet {
  const char* name;
  const LinearKernels* kernels;
  bool dot_bf16, dot_i8;
};

// What runs on this processor, the fastest first.
const std::vector<LinearSet>& linear_sets();

// x: [rows][inputs], out: [rows][outputs]; strides in elements. Where outputs first .. last - 1 alone are wanted, the
// panels that hold them are written and no others.
struct LinearCall {
  const char* x;
  Dtype x_dtype;
  int64_t x_stride;
  int64_t rows;
  char* out;
  Dtype out_dtype;
  int64_t out_stride;
  int64_t first = 0, last = INT64_MAX;
  // The first half of the outputs is activated and multiplied with the second: `out` is half as wide.
  bool gated = false;
  Act act = Act::silu;
};

// A matrix and its packed memory.
class Linear {
 public:
  // Throws std::invalid_argument for an unknown instruction set or sizes that are not positive.
  Linear(const std::string& set, Dtype dtype, int64_t outputs, int64_t inputs);
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  // Rows `first ..` of the matrix, from memory in which they are `stride` elements apart. What is kept in int8 or int4
  // comes in int8 with scales, one for each row and group of inputs; for int4 a scale and what 0 stands for.
  void put(int64_t first, int64_t rows, Dtype from, const char* weights, int64_t stride, const float* scales,
           const float* bias, int threads);
  // Forget the weights: they are put again, kept as `dtype`. Whoever holds this object needs not know. The bias stays.
  void reset(Dtype dtype);
  void run(const LinearCall& call, int threads) const;
  // The largest output of each row in `dtype`, and its index: the lowest of equals, a NaN before all.
  void argmax(const LinearCall& call, int threads, float* values, int64_t* indices) const;

  // The weights of `count` outputs, in their order, as rows of `inputs` elements: exactly what is multiplied by.
  void read(const int64_t* outputs, int64_t count, Dtype to_type, char* to, int threads) const;

  const char* set() const { return set_->name; }
  // Whether rows of this type may be gated as they are multiplied, to the bits of doing it afterwards.
  bool gates(Dtype rows) const;
  bool rounds_inputs() const { return form_for(Dtype::f32) != Form::floats; }
  int64_t outputs() const { return panels_.outputs; }
  int64_t inputs() const { return panels_.inputs; }
  int64_t bytes() const { return bytes_; }

 private:
  Form form_for(Dtype rows) const;
  void multiply(const LinearCall& call, int threads, std::vector<Best>* best) const;
  int64_t count() const { return (panels_.outputs + kernels_->panel - 1) / kernels_->panel; }

  const LinearSet* set_ = nullptr;
  const LinearKernels* kernels_ = nullptr;
  Panels panels_;
  WeightMemory memory_;
  std::vector<float> bias_;
  int64_t bytes_ = 0;
};

}  // namespace octavo
