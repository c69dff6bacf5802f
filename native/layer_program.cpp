#include "layer_program.h"

#include <algorithm>
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

  char* at(Place place) const { return places[static_cast<int>(place)]; }
};

void LayerProgram::run_tile(const std::vector<Operation>& operations, const Tile& tile, int threads,
                            Times& times) const {
  const char* x = tile.x;
  for (const Operation& one : operations) {
    Lap lap(times, kind_of(one));
    if (one.kind == Operation::Kind::linear) {
      const char* from = one.from == Place::x ? x : tile.at(one.from);
      one.linear->run({from, dtype_, width(one.from), tile.rows, tile.at(one.to), dtype_, width(one.to)},
                      threads);
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

void LayerProgram::run(const LayerStep& step, KernelSet& attention, Workspace& space, const LayerCall& call) const {
  const int64_t rows = step.rows;
  const auto inside = [](int index, size_t size) { return index >= 0 && static_cast<size_t>(index) < size; };
  if (!inside(attending.plan, step.plans.size()) || !inside(attending.write, step.writes.size()) ||
      (attending.turn.rope != Rope::none &&
       (!inside(attending.table, step.tables.size()) || !step.tables[attending.table].cos)))
    refuse("the step was made for other layers");
  const Plan& plan = *step.plans[attending.plan];
  if (plan.tokens != rows || plan.group != attending.group) refuse("the plan was made for another step");
  Turn turn = attending.turn;
  turn.blocks = step.writes[attending.write].blocks;
  turn.offsets = step.writes[attending.write].offsets;
  require_inside(*turn.pages, turn.blocks, turn.offsets, rows);
  if (turn.rope != Rope::none) {
    const LayerStep::Table& table = step.tables[attending.table];
    turn.cos = table.cos;
    turn.sin = table.sin;
    turn.table_row = table.row;
    turn.positions = table.positions;
    for (int64_t t = 0; table.positions && t < rows; t++)
      if (table.positions[t] < 0 || table.positions[t] >= table.rows) refuse("a position is outside the tables");
    turn.table = table.dtype;
  }
  Tile tile{};
  const int64_t most = std::min(kLayerTile, rows);
  for (Place place : {Place::normed, Place::delta, Place::second, Place::wide, Place::narrow})
    tile.places[static_cast<int>(place)] = space.places[static_cast<int>(place)].of(most * bytes(place));
  char* qkv = space.places[static_cast<int>(Place::qkv)].of(rows * bytes(Place::qkv));
  char* attended = space.places[static_cast<int>(Place::attended)].of(rows * bytes(Place::attended));
  const auto run_tiles = [&](const std::vector<Operation>& operations, const char* x, int64_t count) {
    for (int64_t first = 0; first < count; first += kLayerTile) {
      tile.rows = std::min(kLayerTile, count - first);
      tile.x = x + first * bytes(Place::x);
      tile.out = call.out + first * bytes(Place::x);
      tile.places[static_cast<int>(Place::qkv)] = qkv + first * bytes(Place::qkv);
      tile.places[static_cast<int>(Place::attended)] = attended + first * bytes(Place::attended);
      if (call.handed) tile.places[static_cast<int>(Place::handed)] = call.handed + first * bytes(Place::x);
      run_tile(operations, tile, step.threads, space.times);
    }
  };
  run_tiles(before, call.x, rows);
  turn.rows = qkv;
  turn.row = width(Place::qkv);
  {
    Lap lap(space.times, Times::turn);
    run_turn(kernels_, turn, rows, step.threads);
  }
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
  run_tiles(after, x, call.keep ? call.kept : rows);
}

}  // namespace octavo
