#include "kernel_set.h"

#include <algorithm>
#include <stdexcept>

#include "threads.h"

namespace octavo {
namespace {

constexpr double kWorkWorthThreads = 4096;  // keys x rows: below it, waking threads costs more than it saves

struct Job {
  const Kernels* kernels;
  const Call* call;
  const Plan* plan;
  size_t scratch;
};

void attend_one(void* context, int64_t index) {
  const Job& job = *static_cast<Job*>(context);
  const int heads = job.plan->kv_heads;
  job.kernels->attend(*job.call, job.plan->items.data(), job.plan->tasks[index / heads],
                      static_cast<int>(index % heads), thread_floats(job.scratch));
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

}  // namespace

std::vector<const Kernels*> attention_kernels() {
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

void require_inside(const Pages& pages, const int64_t* blocks, const int64_t* offsets, int64_t tokens) {
  for (int64_t t = 0; t < tokens; t++)
    if (blocks[t] < 0 || blocks[t] >= pages.units || offsets[t] < 0 || offsets[t] >= pages.block_tokens)
      throw std::invalid_argument("packed token " + std::to_string(t) + " is written outside the pages");
}

KernelSet::KernelSet(const std::string& name) {
  for (const Kernels* one : attention_kernels())
    if (name == one->name) kernels_ = one;
  if (!kernels_) throw std::invalid_argument("no kernels named " + name + " run on this processor");
#if defined(__x86_64__)
  // AMD's dots of bfloat16 do twice the work of its multiply-adds; Intel's, without AMX, half of it.
  dots_ = kernels_ == &kAvx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_is("amd");
#endif
}

void KernelSet::attend(const Plan& plan, const Pages& pages, const Queries& queries, float scale, float softcap,
                       const float* sinks, int threads) {
  if (pages.kv_heads != plan.kv_heads || pages.block_tokens != plan.block_tokens || plan.last_unit >= pages.units)
    throw std::invalid_argument("the plan was made for other pages");
  Call call{&pages, plan.sight, plan.group, queries.dtype, queries.q, queries.q_token, queries.q_head, queries.out,
            int64_t{plan.group} * plan.kv_heads * pages.v_dim, pages.v_dim, scale, softcap, sinks,
            dots_ && queries.dtype == Dtype::bf16 && pages.dtype == Dtype::bf16, nullptr, nullptr};
  if (plan.partial_rows) {
    partials_.resize(std::max(partials_.size(), plan.partial_rows * kernels_->partial_floats(call)));
    const size_t count = static_cast<size_t>(plan.tiles) * plan.kv_heads;
    if (arrived_.size() < count) arrived_ = std::vector<std::atomic<int>>(count);
    for (size_t i = 0; i < count; i++) arrived_[i].store(0, std::memory_order_relaxed);
    call.partials = partials_.data();
    call.arrived = arrived_.data();
  }
  Job job{kernels_, &call, &plan, kernels_->scratch_floats(call, plan.few_rows, plan.many_rows)};
  run_on_threads(static_cast<int64_t>(plan.tasks.size()) * plan.kv_heads, plan.work < kWorkWorthThreads ? 1 : threads,
                 attend_one, &job);
}

void KernelSet::write(const Write& w, int64_t tokens, int threads) const {
  const Pages& pages = *w.pages;
  require_inside(pages, w.blocks, w.offsets, tokens);
  const int64_t elements = tokens * pages.kv_heads * (pages.k_dim + pages.v_dim);
  WriteJob job{kernels_, &w, tokens, elements < 65536 ? tokens : (tokens + 4 * threads - 1) / (4 * threads)};
  if (tokens) run_on_threads((tokens + job.share - 1) / job.share, threads, write_some, &job);
}

}  // namespace octavo
