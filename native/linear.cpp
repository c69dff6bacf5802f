#include "linear.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "threads.h"

namespace octavo {
namespace linear {
extern const LinearKernels kPortable;
#if defined(__x86_64__)
extern const LinearKernels kAvx2, kAvx512;
#endif
}  // namespace linear

namespace {

constexpr int64_t kSmall = 1 << 16;      // multiply-adds: below it, waking threads costs more than it saves
constexpr int64_t kRowsPacked = 64;      // of a matrix, by one thread at a time
constexpr int64_t kTilesBytes = 400 << 10;  // of one work item: with a panel, less than a second-level cache

std::vector<LinearSet> find_sets() {
  std::vector<LinearSet> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    // AMD's dots of bfloat16 do twice the work of its multiply-adds; Intel's, without AMX, half of it.
    const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd");
    const bool i8 = __builtin_cpu_supports("avx512vnni");
    if (bf16 || i8) found.push_back({"avx512dot", &linear::kAvx512, bf16, i8});
    found.push_back({"avx512", &linear::kAvx512, false, false});
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    found.push_back({"avx2", &linear::kAvx2, false, false});
#endif
  found.push_back({"portable", &linear::kPortable, false, false});
  return found;
}

struct Gather {
  const LinearKernels* kernels;
  Form form;
  const LinearCall* call;
  const Tile* tiles;
  int64_t inputs;
};

void gather_one(void* context, int64_t index) {
  const Gather& g = *static_cast<Gather*>(context);
  const Tile& tile = g.tiles[index];
  g.kernels->gather(g.form, g.call->x_dtype, g.call->x + tile.first * g.call->x_stride * size_of(g.call->x_dtype),
                    g.call->x_stride, tile.rows, g.inputs, const_cast<float*>(tile.x));
}

struct Put {
  const LinearKernels* kernels;
  const Panels* panels;
  int64_t first, rows;
  Dtype from;
  const char* weights;
  int64_t row_bytes;
  const float* scales;
  int64_t row_scales;
};

void put_some(void* context, int64_t index) {
  const Put& put = *static_cast<Put*>(context);
  const int64_t last = std::min(put.rows, (index + 1) * kRowsPacked);
  float* wide = thread_floats(2 * put.panels->inputs + 64);
  for (int64_t i = index * kRowsPacked; i < last; i++)
    put.kernels->pack(*put.panels, put.first + i, put.from, put.weights + i * put.row_bytes,
                      put.scales + i * put.row_scales, wide);
}

struct Read {
  const LinearKernels* kernels;
  const Panels* panels;
  const int64_t* outputs;
  Dtype to_type;
  char* to;
};

void read_one(void* context, int64_t index) {
  const Read& read = *static_cast<Read*>(context);
  const int64_t inputs = read.panels->inputs;
  read.kernels->unpack(*read.panels, read.outputs[index], read.to_type,
                       read.to + index * inputs * size_of(read.to_type), thread_floats(inputs + 64));
}

// A thread's own run of items: panels side by side, so that what is asked for ahead of one belongs to the next.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

struct Job {
  const LinearKernels* kernels;
  Product product;  // of all rows
  int64_t begin, end;  // panels
  int together;        // panels of an item
  int64_t stripes;     // items side by side for one range of rows
  int tiles_of_item;
  std::vector<Share> shares;
  Best* best;          // [share][row], or null
  int64_t rows;
};

void multiply_item(const Job& job, int64_t index, Best* best) {
  const int64_t panel = job.begin + index % job.stripes * job.together;
  const int first = static_cast<int>(index / job.stripes) * job.tiles_of_item;
  Product part = job.product;
  part.best = best;
  part.tiles += first;
  part.count = std::min(job.tiles_of_item, part.count - first);
  job.kernels->multiply(part, panel, static_cast<int>(std::min<int64_t>(job.together, job.end - panel)),
                        thread_floats(job.kernels->scratch(part)));
}

// One's own share, then what is left of the others'.
void multiply_share(void* context, int64_t index) {
  Job& job = *static_cast<Job*>(context);
  const size_t count = job.shares.size();
  Best* best = job.best ? job.best + index * job.rows : nullptr;
  for (size_t i = 0; i < count; i++) {
    Share& share = job.shares[(index + i) % count];
    for (int64_t item; (item = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;)
      multiply_item(job, item, best);
  }
}

}  // namespace

const std::vector<LinearSet>& linear_sets() {
  static const std::vector<LinearSet> found = find_sets();
  return found;
}

Linear::Linear(const std::string& set, Dtype dtype, int64_t outputs, int64_t inputs) {
  for (const LinearSet& one : linear_sets())
    if (set == one.name) set_ = &one;
  if (!set_) throw std::invalid_argument("no linear kernels named " + set + " run on this processor");
  kernels_ = set_->kernels;
  if (outputs < 1 || inputs < 1 || outputs > INT32_MAX / 2 || inputs > INT32_MAX / 2)
    throw std::invalid_argument("a matrix has at least one output and one input");
  panels_ = {dtype, outputs, inputs, nullptr, nullptr, 0};
  reset(dtype);
}

void Linear::reset(Dtype dtype) {
  if (dtype == Dtype::e4m3) throw std::invalid_argument("weights are kept as float32, bfloat16, float16, int8 or int4");
  const int64_t panel_bytes = kernels_->bytes(dtype, panels_.inputs);
  const int64_t bytes = (count() * panel_bytes + 63) / 64 * 64;
  panels_.weights = memory_.of(bytes);
  panels_.dtype = dtype;
  panels_.panel_bytes = panel_bytes;
  bytes_ = bytes;
}

void Linear::put(int64_t first, int64_t rows, Dtype from, const char* weights, int64_t stride, const float* scales,
                 const float* bias, int threads) {
  if (first < 0 || rows < 0 || first + rows > panels_.outputs)
    throw std::invalid_argument("rows " + std::to_string(first) + " to " + std::to_string(first + rows) +
                                " are outside the matrix");
  if (quantised(panels_.dtype) != (from == Dtype::i8 && scales != nullptr) || from > Dtype::i8)
    throw std::invalid_argument("weights in int8 and int4 come as int8 with their scales, and no others do");
  if (bias) {
    bias_.resize(count() * kernels_->panel);
    std::copy(bias, bias + rows, bias_.begin() + first);
    panels_.bias = bias_.data();
  }
  const int64_t groups = scales ? (panels_.inputs + kGroup - 1) / kGroup : 0;
  Put job{kernels_, &panels_, first,  rows, from, weights, stride * size_of(from),
          scales,   panels_.dtype == Dtype::i4 ? 2 * groups : groups};
  run_on_threads((rows + kRowsPacked - 1) / kRowsPacked, threads, put_some, &job);
}

void Linear::run(const LinearCall& call, int threads) const { multiply(call, threads, nullptr); }

void Linear::argmax(const LinearCall& call, int threads, float* values, int64_t* indices) const {
  std::vector<Best> best;
  LinearCall search = call;
  search.out = nullptr;
  multiply(search, threads, &best);
  for (int64_t r = 0; r < call.rows; r++) {
    Best found = best[r];
    for (size_t other = r + call.rows; other < best.size(); other += call.rows)
      found.see(best[other].value, best[other].index);
    values[r] = found.value;
    indices[r] = found.index;
  }
}

void Linear::read(const int64_t* outputs, int64_t count, Dtype to_type, char* to, int threads) const {
  for (int64_t i = 0; i < count; i++)
    if (outputs[i] < 0 || outputs[i] >= panels_.outputs)
      throw std::invalid_argument("there is no output " + std::to_string(outputs[i]));
  Read job{kernels_, &panels_, outputs, to_type, to};
  run_on_threads(count, count * panels_.inputs < kSmall ? 1 : threads, read_one, &job);
}

Form Linear::form_for(Dtype rows) const {
  if (panels_.dtype == Dtype::bf16 && rows == Dtype::bf16 && set_->dot_bf16) return Form::pairs;
  if (panels_.dtype == Dtype::i8 && set_->dot_i8) return Form::quads_i8;
  if (panels_.dtype == Dtype::i4 && set_->dot_i8) return Form::quads_i4;
  return Form::floats;
}

bool Linear::gates(Dtype rows) const {
  const bool alike = rows == Dtype::f32 ? panels_.dtype == Dtype::f32 : form_for(rows) == Form::pairs;
  return alike && panels_.outputs % (2 * kernels_->panel) == 0;
}

void Linear::multiply(const LinearCall& call, int threads, std::vector<Best>* best) const {
  const int64_t begin = call.first / kernels_->panel;
  const int64_t last = call.gated ? panels_.outputs / 2 : std::min(call.last, panels_.outputs);
  const int64_t end = (last + kernels_->panel - 1) / kernels_->panel;
  const int64_t panels = end - begin;
  if (call.rows < 1 || panels < 1) return;
  const Form form = form_for(call.x_dtype);
  const int most = form >= Form::quads_i8 ? std::min(kTileQuads, kernels_->tile) : kernels_->tile;
  const int64_t count = (call.rows + most - 1) / most;
  std::vector<Tile> tiles(count);
  const int64_t inputs = places(form, panels_.inputs);
  float* x = thread_floats(call.rows * inputs, Use::prepared);
  for (int64_t t = 0, first = 0; t < count; t++) {  // as even as they can be
    const int rows = static_cast<int>((call.rows - first + count - t - 1) / (count - t));
    tiles[t] = {first, rows, x + first * inputs};
    first += rows;
  }
  const int64_t work = call.rows * panels * kernels_->panel * panels_.inputs * (call.gated ? 2 : 1);
  if (work < kSmall) threads = 1;
  Gather g{kernels_, form, &call, tiles.data(), panels_.inputs};
  if (call.rows == 1 && call.x_dtype == Dtype::f32 && form == Form::floats && panels_.inputs == inputs)
    tiles[0].x = reinterpret_cast<const float*>(call.x);
  else run_on_threads(count, call.rows * panels_.inputs < 32768 ? 1 : threads, gather_one, &g);
  Product product{&panels_, form, tiles.data(), static_cast<int>(count), call.out, call.out_dtype,
                  call.out_stride, nullptr, call.gated ? end : 0, call.act};
  const bool few = call.rows <= kernels_->rows_of_many && !quantised(panels_.dtype) && panels >= 16 * threads;
  const int together = few && !call.gated ? 2 : 1;
  const int64_t stripes = (panels + together - 1) / together;
  const int64_t at_once = std::max<int64_t>(1, kTilesBytes / (most * inputs * int64_t{sizeof(float)}));
  const int64_t ranges = (count + at_once - 1) / at_once;
  const int tiles_of_item = static_cast<int>((count + ranges - 1) / ranges);
  const int64_t items = stripes * ((count + tiles_of_item - 1) / tiles_of_item);
  const int64_t shares = std::max<int64_t>(1, std::min<int64_t>(threads, items));
  if (best) best->resize(shares * call.rows);
  Job job{kernels_, product, begin, end, together, stripes, tiles_of_item, std::vector<Share>(shares),
          best ? best->data() : nullptr, call.rows};
  for (int64_t i = 0; i < shares; i++) {
    job.shares[i].next = items * i / shares;
    job.shares[i].end = items * (i + 1) / shares;
  }
  run_on_threads(shares, threads, multiply_share, &job);
}

}  // namespace octavo
