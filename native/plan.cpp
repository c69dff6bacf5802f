#include "plan.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

[[noreturn]] void refuse(int64_t chunk, const std::string& what) {
  throw std::invalid_argument("chunk " + std::to_string(chunk) + ": " + what);
}

void check(const Step& s, int64_t c) {
  const int64_t start = s.starts[c], context = s.contexts[c], count = s.offsets[c + 1] - s.offsets[c];
  if (s.rows[c] < 0 || s.rows[c] >= s.table_rows) refuse(c, "its row is outside the tables");
  if (start < 0 || count < 1 || start + count != context || context > std::numeric_limits<int>::max() / 2)
    refuse(c, "its positions do not match its packed tokens");
  if ((context - 1) / s.block_tokens >= s.table_columns) refuse(c, "its table is shorter than its context");
}

}  // namespace

Plan::Plan(const Step& step, Sight sight_, int group_, int kv_heads_)
    : sight(sight_), group(group_), kv_heads(kv_heads_), block_tokens(step.block_tokens) {
  if (step.block_tokens < 1 || group < 1 || kv_heads < 1) throw std::invalid_argument("a size is not positive");
  for (int64_t c = 0; c < step.chunks; c++) {
    check(step, c);
    const int count = static_cast<int>(step.offsets[c + 1] - step.offsets[c]);
    const int64_t rows = int64_t{count} * group;
    const int positions = rows <= kFewRows ? count : std::max(1, kTileRows / group);
    const int segment_keys = rows <= kShortRows ? kShortSegment : kLongSegment;
    for (int first = 0; first < count; first += positions)
      add_tile(step, c, first, std::min(positions, count - first), segment_keys);
  }
  tokens = step.chunks ? step.offsets[step.chunks] : 0;
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return int64_t{a.key_hi - a.key_lo} * a.count > int64_t{b.key_hi - b.key_lo} * b.count;
  });
}

void Plan::add_tile(const Step& step, int64_t chunk, int first, int count, int segment_keys) {
  const int position = static_cast<int>(step.starts[chunk]) + first;
  const int low = sight.first_key(position), high = position + count;
  const int32_t* table = step.tables + step.rows[chunk] * step.table_columns;
  for (int block = low / block_tokens; block <= (high - 1) / block_tokens; block++) {
    if (table[block] < 0) refuse(chunk, "its table holds a negative entry");
    last_unit = std::max<int64_t>(last_unit, table[block]);
  }
  // Segments end at multiples of their length, wherever the first key is.
  const int first_segment = low / segment_keys, segments = (high - 1) / segment_keys - first_segment + 1;
  const int rows = count * group;
  for (int s = 0; s < segments; s++) {
    Item item{};
    item.table = table;
    item.first = step.offsets[chunk] + first;
    item.position = position;
    item.count = count;
    item.key_lo = std::max(low, (first_segment + s) * segment_keys);
    item.key_hi = std::min(high, (first_segment + s + 1) * segment_keys);
    item.tile = tiles;
    item.segment = s;
    item.segments = segments;
    item.partial = partial_rows;
    if (segments > 1) partial_rows += int64_t{rows} * kv_heads;
    work += double(item.key_hi - item.key_lo) * rows * kv_heads;
    items.push_back(item);
  }
  most_rows = std::max(most_rows, rows);
  tiles++;
}

}  // namespace octavo
