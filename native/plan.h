// One step's work for one kind of layer, cut into items that threads take one by one.
// How a chunk is cut depends on that chunk alone, so that a sequence's result never depends on its batch-mates.
#pragma once

#include <cstdint>
#include <vector>

#include "types.h"

namespace octavo {

// What the caller tells of a step. Arrays of `chunks` entries; `offsets` has one more.
struct Step {
  int64_t chunks;
  const int64_t* rows;
  const int64_t* offsets;
  const int64_t* starts;
  const int64_t* contexts;
  const int32_t* tables;
  int64_t table_rows, table_columns;
  int block_tokens;
};

struct Plan {
  Sight sight;
  int group, kv_heads, block_tokens;
  std::vector<Item> items;
  std::vector<Task> tasks;  // the most work first
  int tiles = 0;
  int few_rows = 0, many_rows = 0;  // of a task at most: of items of few rows, and of others
  int64_t partial_rows = 0;  // over all heads
  int64_t last_unit = -1;    // the highest that is read
  int64_t tokens = 0;
  double work = 0;  // keys x rows over all heads
  std::vector<int64_t> wanted;  // with `keep`: the packed tokens whose queries attend, in order

  // With `keep`, packed tokens: what attends is their queries, and those beside them without which theirs would be
  // taken another way and give other bits. Throws std::invalid_argument where the step contradicts itself.
  Plan(const Step& step, Sight sight, int group, int kv_heads, const int64_t* keep = nullptr, int64_t kept = 0);

 private:
  // The chunk's positions from `first` to before `end`, of which those before `from` are left out.
  void add_tile(const Step& step, int64_t chunk, int first, int from, int end, int segment_keys);
  int agreed(const Item& a, const Item& b, int high) const;
  bool join(Task& task, const Item& a, const Item& b) const;
  void make_tasks();
};

}  // namespace octavo
