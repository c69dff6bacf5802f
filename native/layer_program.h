// A decoder layer as a short list of operations over memory that is used again and again, and a stack of such layers.
//
//   rows --- before: norm, q/k/v ---> turn: rope, pages --- attend --- after: o, sum + norm, gate/up, down, sum ---> rows
//            a tile at a time                                          a tile at a time
//
// What surrounds attention knows no other row, so it runs a tile of rows at a time: what lies between its operations
// stays in the cache, and takes no more memory for a long prompt.
#pragma once

#include <memory>
#include <vector>

#include "kernel_set.h"
#include "layer.h"
#include "linear.h"

namespace octavo {

constexpr int64_t kLayerTile = 384;  // rows

// Where rows lie between operations.
enum class Place : int {
  x = 0, normed = 1, qkv = 2, attended = 3, delta = 4, second = 5, wide = 6, narrow = 7, handed = 8
};
constexpr int kPlaces = 9;

struct Operation {
  enum class Kind { linear, sum, gate } kind;
  Place from, second, to;
  bool adds, doubles;     // sum: `from` is added to x; `second` too
  const Linear* linear;
  const Norm* before;
  const Norm* after;      // sum: what goes to `to`
  float by;
  Act act;
  bool gated;
};

struct Attending {
  Turn turn;              // but for addresses that change with the step
  int group;
  float scale, softcap;
  const float* sinks;
  int plan, write, table;  // which of the step's
};

// What is the same for every layer of a kind in one step.
struct LayerStep {
  struct Write {
    const int64_t* blocks;
    const int64_t* offsets;
  };
  struct Table {
    const char* cos;
    const char* sin;
    int64_t row;
    const int64_t* positions;  // null: one row for each token, in order
    int64_t rows;              // with positions: how many there are
    Dtype dtype;
  };
  int64_t rows = 0;
  int threads = 1;
  std::vector<const Plan*> plans;
  std::unique_ptr<const Plan> last;  // of the rows that are kept after attention, where that is a plan of its own
  std::vector<Write> writes;
  std::vector<Table> tables;
};

// Memory that grows to what was wanted most, aligned to 64 bytes. What it held is lost when it grows.
class Buffer {
 public:
  char* of(size_t bytes);

 private:
  struct Free {
    void operator()(char* p) const;
  };
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0;
};

// Nanoseconds by kind of operation, while somebody asks for them: those that passed for the calling thread, or those
// in which it had a core.
struct Times {
  enum class Clock : int { none, passed, own };
  enum Kind : int { qkv, output, inner, down, sums, turn, attention, activation, kinds };
  static constexpr const char* kNames[kinds] = {"qkv",  "output",    "inner",     "down",
                                                "norms and sums", "rope and pages", "attention", "activation"};
  Clock clock = Clock::none;
  int64_t spent[kinds] = {}, calls[kinds] = {};
};

struct Workspace {
  Buffer places[kPlaces];
  Buffer kept_x, kept_attended, wanted_x, wanted_qkv;
  Times times;
};

// Addresses of one run. Rows are as wide as the model, side by side.
struct LayerCall {
  const char* x;        // what comes in
  char* out;            // what goes out; may be x
  char* handed;         // for a program that hands rows on; else null
  const int64_t* keep;  // null: all rows go on after attention; else these, in this order
  int64_t kept;
};

class LayerProgram {
 public:
  // widths[place]: elements of a row.
  LayerProgram(const LayerKernels& kernels, Dtype dtype, const std::vector<int>& widths);

  std::vector<Operation> before, after;
  Attending attending{};

  // Throws std::invalid_argument where an operation does not fit what it works on.
  void check() const;
  void run(const LayerStep& step, KernelSet& attention, Workspace& space, const LayerCall& call) const;
  Dtype dtype() const { return dtype_; }
  int width(Place place) const { return widths_[static_cast<int>(place)]; }
  const LayerKernels& kernels() const { return kernels_; }

 private:
  struct Tile;
  struct Run;
  struct Rows;
  void run_tile(const std::vector<Operation>& operations, const Tile& tile, int threads, Times& times) const;
  void run_tiles(const std::vector<Operation>& operations, const Rows& rows, const Run& run) const;
  Turn turn_of(const LayerStep& step) const;
  void run_before(const Turn& turn, char* qkv, const Run& run) const;
  void run_before_last(const Turn& turn, char* qkv, const Run& run) const;
  void run_turn_of(const Turn& turn, int64_t rows, const Run& run) const;
  int64_t bytes(Place place) const { return width(place) * size_of(dtype_); }

  const LayerKernels& kernels_;
  Dtype dtype_;
  std::vector<int> widths_;
};

}  // namespace octavo
