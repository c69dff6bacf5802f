// One instruction set's attention kernels, the memory they reuse, and how their work goes to threads.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "plan.h"
#include "types.h"

namespace octavo {

// Those that run on this processor, the fastest first.
std::vector<const Kernels*> attention_kernels();

// Throws std::invalid_argument where a token would be written outside the pages.
void require_inside(const Pages& pages, const int64_t* blocks, const int64_t* offsets, int64_t tokens);

// Queries of `dtype` in rows, and where the results go: [tokens, heads, v_dim] in one piece.
struct Queries {
  Dtype dtype;
  const char* q;
  int64_t q_token, q_head;  // strides in elements
  char* out;
};

// Not for two threads at once. Throws std::invalid_argument where a call contradicts itself.
class KernelSet {
 public:
  KernelSet(const KernelSet&) = delete;
  explicit KernelSet(const std::string& name);

  void attend(const Plan& plan, const Pages& pages, const Queries& queries, float scale, float softcap,
              const float* sinks, int threads);
  void write(const Write& write, int64_t tokens, int threads) const;
  const char* name() const { return kernels_->name; }
  size_t bytes() const { return partials_.size() * sizeof(float) + arrived_.size() * sizeof(arrived_[0]); }

 private:
  const Kernels* kernels_ = nullptr;
  bool dots_ = false;
  std::vector<float> partials_;
  std::vector<std::atomic<int>> arrived_;
};

}  // namespace octavo
