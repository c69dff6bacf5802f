#include "layer_program.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

int64_t now(Times::Clock clock) {
  timespec at;
  clock_gettime(clock == Times::Clock::own ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &at);
  return at.tv_sec * int64_t{1000000000} + at.tv_nsec;
}

// Adds what passes until its end to one kind.
class Lap {
 public:
  Lap(Times& times, Times::Kind kind) : times_(times), kind_(kind) {
    if (times_.clock != Times::Clock::none) start_ = now(times_.clock);
  }
  ~Lap() {
    if (times_.clock == Times::Clock::none) return;
    times_.spent[kind_] += now(times_.clock) - start_;
    times_.calls[kind_]++;
  }

 private:
  Times& times_;
  Times::Kind kind_;
  int64_t start_ = 0;
};

Times::Kind kind_of(const Operation& one) {
  if (one.kind == Operation::Kind::sum) return Times::sums;
  if (one.kind == Operation::Kind::gate) return Times::activation;
  if (one.to == Place::qkv) return Times::qkv;
  if (one.to == Place::wide) return Times::inner;
  return one.from == Place::attended ? Times::output : Times::down;
}

// Whether the activation goes with the product that it follows; nothing else reads what lies between them.
bool gates(const Operation& product, const Operation& next, Dtype dtype) {
  return next.kind == Operation::Kind::gate && next.gated && product.to == Place::wide && next.from == Place::wide &&
         product.linear->gates(dtype);
}

}  // namespace

void Buffer::Free::operator()(char* p) const { std::free(p); }

char* Buffer::of(size_t bytes) {
  if (bytes > size_) {
    memory_.reset();
    size_ = 0;
    const size_t rounded = (bytes + 63) / 64 * 64;
    memory_.reset(static_cast<char*>(std::aligned_alloc(64, rounded)));
    if (!memory_) throw std::bad_alloc();
    size_ = rounded;
  }
  return memory_.get();
}

LayerProgram::LayerProgram(const LayerKernels& kernels, Dtype dtype, const std::vector<int>& widths)
    : kernels_(kernels), dtype_(dtype), widths_(widths) {
  if (widths_.size() != kPlaces) refuse("one width for each place is wanted");
}

void LayerProgram::check() const {
  for (const auto* operations : {&before, &after}) {
    for (const Operation& one : *operations) {
      if (one.kind == Operation::Kind::linear &&
          (one.linear->inputs() != width(one.from) || one.linear->outputs() != width(one.to)))
        refuse("a matrix does not fit its rows");
      if (one.kind == Operation::Kind::gate && width(one.from) != width(one.to) * (one.gated ? 2 : 1))
        refuse("an activation does not fit its rows");
      if (one.kind != Operation::Kind::sum) continue;
      const bool same = (!one.adds || width(one.from) == width(Place::x)) && (!one.after || width(one.to) == width(Place::x)) &&
                        (!one.doubles || width(one.second) == width(Place::x));
      for (const Norm* norm : {one.before, one.after})
        if (norm && norm->width != width(Place::x)) refuse("a norm does not fit its rows");
      if (!same) refuse("a sum does not fit its rows");
    }
  }
  if (!attending.turn.pages) refuse("a layer attends");
  const Pages& pages = *attending.turn.pages;
  const int heads = attending.turn.q_heads;
  if (attending.group < 1 || heads != attending.group * pages.kv_heads) refuse("query heads share key heads evenly");
  if (width(Place::qkv) != heads * pages.k_dim + pages.kv_heads * (pages.k_dim + pages.v_dim) ||
      width(Place::attended) != heads * pages.v_dim)
    refuse("heads do not fit their rows");
}

// Some rows, and where they lie: places that hold all rows are entered at the tile's first.
struct LayerProgram::Tile {
  int64_t rows;
  const char* x;
  char* out;
  char* places[kPlaces];
  int64_t first_output, last_output;  // of q/k/v

  char* at(Place place) const { return places[static_cast<int>(place)]; }
};

// What one run works with.
struct LayerProgram::Run {
  const LayerStep& step;
  Workspace& space;
  const LayerCall& call;
};

// Rows that operations take a tile at a time, and of q/k/v the outputs that are wanted.
struct LayerProgram::Rows {
  int64_t count;
  const char* x;
  char* qkv;
  char* attended;
  int64_t first_output = 0, last_output = INT64_MAX;
};

void LayerProgram::run_tile(const std::vector<Operation>& operations, const Tile& tile, int threads,
                            Times& times) const {
  const char* x = tile.x;
  for (size_t i = 0; i < operations.size(); i++) {
    const Operation& one = operations[i];
    Lap lap(times, kind_of(one));
    if (one.kind == Operation::Kind::linear) {
      const char* from = one.from == Place::x ? x : tile.at(one.from);
      LinearCall call{from, dtype_, width(one.from), tile.rows, tile.at(one.to), dtype_, width(one.to)};
      if (one.to == Place::qkv) {
        call.first = tile.first_output;
        call.last = tile.last_output;
      }
      if (i + 1 < operations.size() && gates(one, operations[i + 1], dtype_)) {
        const Operation& gate = operations[++i];
        call.out = tile.at(gate.to);
        call.out_stride = width(gate.to);
        call.gated = true;
        call.act = gate.act;
      }
      one.linear->run(call, threads);
    } else if (one.kind == Operation::Kind::gate) {
      run_gate(kernels_, {one.act, dtype_, one.gated, width(one.to), tile.at(one.from), tile.at(one.to)}, tile.rows,
               threads);
    } else {
      Residual sum{dtype_, width(Place::x), x, one.adds ? tile.at(one.from) : nullptr,
                   one.doubles ? tile.at(one.second) : nullptr, one.before, one.by, one.adds ? tile.out : nullptr,
                   one.after, tile.at(one.to)};
      run_residual(kernels_, sum, tile.rows, threads);
      if (one.adds) x = tile.out;
    }
  }
}

void LayerProgram::run_tiles(const std::vector<Operation>& operations, const Rows& rows, const Run& run) const {
  Tile tile{};
  tile.first_output = rows.first_output;
  tile.last_output = rows.last_output;
  const auto place = [&](Place one) -> char*& { return tile.places[static_cast<int>(one)]; };
  for (Place one : {Place::normed, Place::delta, Place::second, Place::wide, Place::narrow})
    place(one) = run.space.places[static_cast<int>(one)].of(std::min(kLayerTile, run.step.rows) * bytes(one));
  for (int64_t first = 0; first < rows.count; first += kLayerTile) {
    tile.rows = std::min(kLayerTile, rows.count - first);
    tile.x = rows.x + first * bytes(Place::x);
    tile.out = run.call.out + first * bytes(Place::x);
    if (rows.qkv) place(Place::qkv) = rows.qkv + first * bytes(Place::qkv);
    if (rows.attended) place(Place::attended) = rows.attended + first * bytes(Place::attended);
    if (run.call.handed) place(Place::handed) = run.call.handed + first * bytes(Place::x);
    run_tile(operations, tile, run.step.threads, run.space.times);
  }
}

Turn LayerProgram::turn_of(const LayerStep& step) const {
  Turn turn = attending.turn;
  turn.row = width(Place::qkv);
  turn.blocks = step.writes[attending.write].blocks;
  turn.offsets = step.writes[attending.write].offsets;
  require_inside(*turn.pages, turn.blocks, turn.offsets, step.rows);
  if (turn.rope == Rope::none) return turn;
  const LayerStep::Table& table = step.tables[attending.table];
  turn.cos = table.cos;
  turn.sin = table.sin;
  turn.table_row = table.row;
  turn.positions = table.positions;
  for (int64_t t = 0; table.positions && t < step.rows; t++)
    if (table.positions[t] < 0 || table.positions[t] >= table.rows) refuse("a position is outside the tables");
  turn.table = table.dtype;
  return turn;
}

void LayerProgram::run_turn_of(const Turn& turn, int64_t rows, const Run& run) const {
  Lap lap(run.space.times, Times::turn);
  run_turn(kernels_, turn, rows, run.step.threads);
}

// Queries, keys and values of all rows.
void LayerProgram::run_before(const Turn& turn, char* qkv, const Run& run) const {
  run_tiles(before, {run.step.rows, run.call.x, qkv, nullptr}, run);
  Turn all = turn;
  all.rows = qkv;
  run_turn_of(all, run.step.rows, run);
}

// Keys and values of all rows, and the queries of those alone that attend.
void LayerProgram::run_before_last(const Turn& turn, char* qkv, const Run& run) const {
  const std::vector<int64_t>& wanted = run.step.last->wanted;
  const int64_t q_all = int64_t{turn.q_heads} * turn.pages->k_dim, count = static_cast<int64_t>(wanted.size());
  run_tiles(before, {run.step.rows, run.call.x, qkv, nullptr, q_all}, run);
  Turn keys = turn;
  keys.q_heads = 0;
  keys.rows = qkv + q_all * size_of(dtype_);
  run_turn_of(keys, run.step.rows, run);
  const int64_t wide = bytes(Place::x), row = bytes(Place::qkv);
  char* x = run.space.wanted_x.of(count * wide);
  std::vector<int64_t> positions(count);
  for (int64_t i = 0; i < count; i++) {
    std::memcpy(x + i * wide, run.call.x + wanted[i] * wide, wide);
    positions[i] = turn.positions ? turn.positions[wanted[i]] : wanted[i];
  }
  Turn queries = turn;
  queries.rows = run.space.wanted_qkv.of(count * row);
  queries.blocks = nullptr;
  queries.positions = positions.data();
  run_tiles(before, {count, x, queries.rows, nullptr, 0, q_all}, run);
  run_turn_of(queries, count, run);
  for (int64_t i = 0; i < count; i++)
    std::memcpy(qkv + wanted[i] * row, queries.rows + i * row, q_all * size_of(dtype_));
}

void LayerProgram::run(const LayerStep& step, KernelSet& attention, Workspace& space, const LayerCall& call) const {
  const int64_t rows = step.rows;
  const auto inside = [](int index, size_t size) { return index >= 0 && static_cast<size_t>(index) < size; };
  if (!inside(attending.plan, step.plans.size()) || !inside(attending.write, step.writes.size()) ||
      (attending.turn.rope != Rope::none &&
       (!inside(attending.table, step.tables.size()) || !step.tables[attending.table].cos)))
    refuse("the step was made for other layers");
  const bool last = call.keep && step.last;
  const Plan& plan = last ? *step.last : *step.plans[attending.plan];
  if (plan.tokens != rows || plan.group != attending.group) refuse("the plan was made for another step");
  const Run run{step, space, call};
  const Turn turn = turn_of(step);
  char* qkv = space.places[static_cast<int>(Place::qkv)].of(rows * bytes(Place::qkv));
  char* attended = space.places[static_cast<int>(Place::attended)].of(rows * bytes(Place::attended));
  last ? run_before_last(turn, qkv, run) : run_before(turn, qkv, run);
  const Pages& pages = *turn.pages;
  Queries queries{dtype_, qkv, width(Place::qkv), pages.k_dim, attended};
  {
    Lap lap(space.times, Times::attention);
    attention.attend(plan, pages, queries, attending.scale, attending.softcap, attending.sinks, step.threads);
  }
  const char* x = call.x;
  if (call.keep) {
    const size_t wide = bytes(Place::x), heads = bytes(Place::attended);
    char* kept = space.kept_x.of(call.kept * wide);
    char* kept_attended = space.kept_attended.of(call.kept * heads);
    for (int64_t i = 0; i < call.kept; i++) {
      if (call.keep[i] < 0 || call.keep[i] >= rows) refuse("a row that is kept is not there");
      std::memcpy(kept + i * wide, x + call.keep[i] * wide, wide);
      std::memcpy(kept_attended + i * heads, attended + call.keep[i] * heads, heads);
    }
    x = kept;
    attended = kept_attended;
  }
  run_tiles(after, {call.keep ? call.kept : rows, x, nullptr, attended}, run);
}

}  // namespace octavo
