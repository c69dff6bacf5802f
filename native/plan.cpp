#include "plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

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

// Which packed tokens are kept.
std::vector<bool> marks(int64_t tokens, const int64_t* keep, int64_t kept) {
  std::vector<bool> marked(tokens);
  for (int64_t i = 0; i < kept; i++) {
    if (keep[i] < 0 || keep[i] >= tokens) throw std::invalid_argument("a token that is kept is not there");
    marked[keep[i]] = true;
  }
  return marked;
}

}  // namespace

Plan::Plan(const Step& step, Sight sight_, int group_, int kv_heads_, const int64_t* keep, int64_t kept)
    : sight(sight_), group(group_), kv_heads(kv_heads_), block_tokens(step.block_tokens) {
  if (step.block_tokens < 1 || group < 1 || kv_heads < 1) throw std::invalid_argument("a size is not positive");
  tokens = step.chunks ? step.offsets[step.chunks] : 0;
  const std::vector<bool> marked = marks(keep ? tokens : 0, keep, kept);
  for (int64_t c = 0; c < step.chunks; c++) {
    check(step, c);
    const int count = static_cast<int>(step.offsets[c + 1] - step.offsets[c]);
    const int64_t rows = int64_t{count} * group;
    const int positions = rows <= kFewRows ? count : std::max(1, kTileRows / group);
    const int segment_keys = rows <= kShortRows ? kShortSegment : kLongSegment;
    for (int first = 0; first < count; first += positions) {
      const int end = std::min(first + positions, count);
      int from = first;
      if (keep) {
        while (from < end && !marked[step.offsets[c] + from]) from++;
        if (from == end) continue;
        from = std::max(first, std::min(from, end - kFewRows / group - 1));
        for (int i = from; i < end; i++) wanted.push_back(step.offsets[c] + i);
      }
      add_tile(step, c, first, from, end, segment_keys);
    }
  }
  make_tasks();
}

void Plan::add_tile(const Step& step, int64_t chunk, int first, int from, int end, int segment_keys) {
  const int start = static_cast<int>(step.starts[chunk]), count = end - from;
  const int low = sight.first_key(start + first), high = start + end;
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
    item.first = step.offsets[chunk] + from;
    item.position = start + from;
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
  if (rows > kFewRows) many_rows = std::max(many_rows, rows);
  tiles++;
}

// How far two items' tables agree, up to key `high`, in whole tiles from their first key on.
int Plan::agreed(const Item& a, const Item& b, int high) const {
  high = std::min({high, a.key_hi, b.key_hi});
  int key = a.key_lo;
  while (key < high && a.table[key / block_tokens] == b.table[key / block_tokens])
    key = (key / block_tokens + 1) * block_tokens;
  return a.key_lo + (std::min(key, high) - a.key_lo) / kKeyTile * kKeyTile;
}

// Whether item b may be taken together with the task that item a begins: then the task reaches as far as both agree.
bool Plan::join(Task& task, const Item& a, const Item& b) const {
  if (a.count != b.count || (task.count + 1) * a.count * group > kTogetherRows) return false;
  const int together = agreed(a, b, task.together);
  if (together == a.key_lo || together - a.key_lo < (task.together - a.key_lo) / 2) return false;
  task.together = together;
  task.count++;
  return true;
}

// Items of few rows that begin with the same keys are laid side by side, in their order. Which are found is a matter
// of speed alone.
void Plan::make_tasks() {
  std::map<std::pair<int, int32_t>, size_t> open;  // first key and its block -> the task that others may join
  std::vector<size_t> owner(items.size());
  for (size_t i = 0; i < items.size(); i++) {
    const Item& item = items[i];
    owner[i] = tasks.size();
    if (item.count * group <= kFewRows) {
      const auto [at, fresh] = open.try_emplace({item.key_lo, item.table[item.key_lo / block_tokens]}, tasks.size());
      if (!fresh && join(tasks[at->second], items[tasks[at->second].first], item)) owner[i] = at->second;
      else at->second = tasks.size();
    }
    if (owner[i] == tasks.size()) tasks.push_back({static_cast<int64_t>(i), 1, item.key_hi});
  }
  std::vector<int64_t> next(tasks.size());
  int64_t first = 0;
  for (size_t t = 0; t < tasks.size(); t++) {
    next[t] = tasks[t].first = first;
    first += tasks[t].count;
  }
  std::vector<Item> laid(items.size());
  for (size_t i = 0; i < items.size(); i++) laid[next[owner[i]]++] = items[i];
  items = std::move(laid);
  for (const Task& task : tasks) {
    const int rows = items[task.first].count * group;
    if (rows <= kFewRows) few_rows = std::max(few_rows, task.count * rows);
  }
  auto size = [&](const Task& task) {
    int64_t sum = 0;
    for (int i = 0; i < task.count; i++) {
      const Item& item = items[task.first + i];
      sum += int64_t{item.key_hi - item.key_lo} * item.count;
    }
    return sum;
  };
  std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& a, const Task& b) { return size(a) > size(b); });
}

}  // namespace octavo
