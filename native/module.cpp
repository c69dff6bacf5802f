// The Python face of the kernels: checks sizes and addresses' bounds, gives up the interpreter lock, hands out work.
// Tensors come as addresses and strides; octavo/kernels/cpu.py reads them off torch tensors and checks their types.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "layer_module.h"
#include "linear_module.h"
#include "plan.h"
#include "threads.h"
#include "types.h"

namespace nb = nanobind;

namespace octavo {
namespace {

using Int64s = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tables = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr double kWorkWorthThreads = 4096;  // keys x rows: below it, waking threads costs more than it saves

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    found.push_back(&kAvx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&kAvx2);
#endif
  found.push_back(&kPortable);
  return found;
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const Kernels* one : available()) all.emplace_back(one->name);
  return all;
}

Dtype dtype_of(int number, Dtype most = Dtype::f16) {
  if (number < 0 || number > static_cast<int>(most))
    throw std::invalid_argument("dtype: 0 is float32, 1 bfloat16, 2 float16; of pages also 3 int8, 4 float8 e4m3");
  return static_cast<Dtype>(number);
}

// Addresses of keys, values and their scales; strides of a head and a token in bytes, for each of k, v and scales;
// sizes: heads, tokens of a block, dims of k and v.
Pages pages_of(int dtype, const std::vector<uintptr_t>& at, int64_t units, int64_t unit_bytes,
               const std::vector<int64_t>& strides, const std::vector<int>& sizes) {
  if (at.size() != 4 || strides.size() != 6 || sizes.size() != 4)
    throw std::invalid_argument("four addresses, six strides and four sizes are wanted");
  auto address = [&](int i) { return reinterpret_cast<const char*>(at[i]); };
  Pages p{dtype_of(dtype, Dtype::e4m3), address(0), address(1), units, unit_bytes, strides[0], strides[1], strides[2],
          strides[3], sizes[0], sizes[1], sizes[2], sizes[3], address(2), address(3), strides[4], strides[5]};
  if (!p.k || !p.v || quantised(p.dtype) != (p.k_scales && p.v_scales))
    throw std::invalid_argument("quantised pages have scales, and no others");
  if (p.kv_heads < 1 || p.block_tokens < 1 || p.k_dim < 1 || p.v_dim < 1 || p.k_dim > kMostDim || p.v_dim > kMostDim)
    throw std::invalid_argument("head dimensions go from 1 to " + std::to_string(kMostDim));
  return p;
}

// A plan and the arrays that its items point into.
struct HeldPlan {
  Int64s rows, offsets, starts, contexts;
  Tables tables;
  Plan plan;

  static Step step(const Int64s& rows, const Int64s& offsets, const Int64s& starts, const Int64s& contexts,
                   const Tables& tables, int block_tokens) {
    const size_t n = rows.shape(0);
    if (offsets.shape(0) != n + 1 || starts.shape(0) != n || contexts.shape(0) != n)
      throw std::invalid_argument("rows, offsets, starts and contexts differ in length");
    return {static_cast<int64_t>(n), rows.data(), offsets.data(), starts.data(), contexts.data(), tables.data(),
            static_cast<int64_t>(tables.shape(0)), static_cast<int64_t>(tables.shape(1)), block_tokens};
  }
  HeldPlan(Int64s rows_, Int64s offsets_, Int64s starts_, Int64s contexts_, Tables tables_, int block_tokens,
           int window, int chunk, int group, int kv_heads)
      : rows(rows_), offsets(offsets_), starts(starts_), contexts(contexts_), tables(tables_),
        plan(step(rows, offsets, starts, contexts, tables, block_tokens), Sight{window, chunk}, group, kv_heads) {}
};

struct Job {
  const Kernels* kernels;
  const Call* call;
  const Plan* plan;
  size_t scratch;
};

void attend_one(void* context, int64_t index) {
  const Job& job = *static_cast<Job*>(context);
  const int heads = job.plan->kv_heads;
  job.kernels->attend(*job.call, job.plan->items[index / heads], static_cast<int>(index % heads),
                      thread_floats(job.scratch));
}

struct WriteJob {
  const Kernels* kernels;
  const Write* write;
  int64_t tokens, share;
};

void write_some(void* context, int64_t index) {
  const WriteJob& job = *static_cast<WriteJob*>(context);
  const int64_t first = index * job.share, last = first + job.share;
  job.kernels->write(*job.write, first, last < job.tokens ? last : job.tokens);
}

// One instruction set and the memory it reuses. Not for two threads at once.
class KernelSet {
 public:
  KernelSet(const KernelSet&) = delete;
  explicit KernelSet(const std::string& name) {
    for (const Kernels* one : available())
      if (name == one->name) kernels_ = one;
    if (!kernels_) throw std::invalid_argument("no kernels named " + name + " run on this processor");
  }

  void attend(const HeldPlan& held, const Pages& pages, int dtype, uintptr_t q, int64_t q_token, int64_t q_head,
              uintptr_t out, float scale, float softcap, uintptr_t sinks, int threads) {
    const Plan& plan = held.plan;
    if (pages.kv_heads != plan.kv_heads || pages.block_tokens != plan.block_tokens || plan.last_unit >= pages.units)
      throw std::invalid_argument("the plan was made for other pages");
    Call call{&pages, plan.sight, plan.group, dtype_of(dtype), reinterpret_cast<const char*>(q), q_token, q_head,
              reinterpret_cast<char*>(out), int64_t{plan.group} * plan.kv_heads * pages.v_dim, pages.v_dim, scale,
              softcap, reinterpret_cast<const float*>(sinks), nullptr, nullptr};
    nb::gil_scoped_release unlocked;
    if (plan.partial_rows) {
      partials_.resize(std::max(partials_.size(), plan.partial_rows * kernels_->partial_floats(call)));
      const size_t count = static_cast<size_t>(plan.tiles) * plan.kv_heads;
      if (arrived_.size() < count) arrived_ = std::vector<std::atomic<int>>(count);
      for (size_t i = 0; i < count; i++) arrived_[i].store(0, std::memory_order_relaxed);
      call.partials = partials_.data();
      call.arrived = arrived_.data();
    }
    Job job{kernels_, &call, &plan, kernels_->scratch_floats(call, plan.most_rows)};
    run_on_threads(static_cast<int64_t>(plan.items.size()) * plan.kv_heads, plan.work < kWorkWorthThreads ? 1 : threads,
                   attend_one, &job);
  }

  void write(const Pages& pages, int dtype, uintptr_t k, int64_t k_token, int64_t k_head, uintptr_t v, int64_t v_token,
             int64_t v_head, uintptr_t blocks, uintptr_t offsets, int64_t tokens, int threads) const {
    Write w{&pages, dtype_of(dtype), reinterpret_cast<const char*>(k), k_token, k_head,
            reinterpret_cast<const char*>(v), v_token, v_head, reinterpret_cast<const int64_t*>(blocks),
            reinterpret_cast<const int64_t*>(offsets)};
    for (int64_t t = 0; t < tokens; t++)
      if (w.blocks[t] < 0 || w.blocks[t] >= pages.units || w.offsets[t] < 0 || w.offsets[t] >= pages.block_tokens)
        throw std::invalid_argument("packed token " + std::to_string(t) + " is written outside the pages");
    nb::gil_scoped_release unlocked;
    const int64_t elements = tokens * pages.kv_heads * (pages.k_dim + pages.v_dim);
    WriteJob job{kernels_, &w, tokens, elements < 65536 ? tokens : (tokens + 4 * threads - 1) / (4 * threads)};
    if (tokens) run_on_threads((tokens + job.share - 1) / job.share, threads, write_some, &job);
  }

  const char* name() const { return kernels_->name; }

 private:
  const Kernels* kernels_ = nullptr;
  std::vector<float> partials_;
  std::vector<std::atomic<int>> arrived_;
};

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
  using namespace octavo;
  m.doc() = "octavo's CPU kernels; use them through octavo.kernels.cpu";
  m.def("instruction_sets", &names, "Names of the kernels that run on this processor, the fastest first.");
  m.def("thread_runtime", [] { return std::string(thread_runtime()); },
        "File of the OpenMP runtime whose threads are used; empty where there is none.");
  nb::class_<Pages>(m, "Pages")
      .def("__init__",
           [](Pages* self, int dtype, const std::vector<uintptr_t>& addresses, int64_t units, int64_t unit_bytes,
              const std::vector<int64_t>& strides, const std::vector<int>& sizes) {
             new (self) Pages(pages_of(dtype, addresses, units, unit_bytes, strides, sizes));
           });
  nb::class_<HeldPlan>(m, "Plan")
      .def(nb::init<Int64s, Int64s, Int64s, Int64s, Tables, int, int, int, int, int>())
      .def_prop_ro("items", [](const HeldPlan& p) { return p.plan.items.size(); });
  nb::class_<KernelSet>(m, "Kernels")
      .def(nb::init<const std::string&>())
      .def_prop_ro("name", &KernelSet::name)
      .def("attend", &KernelSet::attend)
      .def("write", &KernelSet::write);
  bind_linear(m);
  bind_layer(m);
}
