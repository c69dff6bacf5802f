#include "layer.h"

#include <algorithm>

#include "threads.h"

namespace octavo {
namespace layer {
extern const LayerKernels kPortable;
#if defined(__x86_64__)
extern const LayerKernels kAvx2, kAvx512, kAvx512Bf16;
#endif
}  // namespace layer

namespace {

constexpr int64_t kAlone = 1 << 14;  // elements: below it, waking threads costs more than it saves

std::vector<const LayerKernels*> find_kernels() {
  std::vector<const LayerKernels*> found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512bf16")) found.push_back(&layer::kAvx512Bf16);
    found.push_back(&layer::kAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&layer::kAvx2);
#endif
  found.push_back(&layer::kPortable);
  return found;
}

template <class Work>
struct Share {
  const LayerKernels* kernels;
  const Work* work;
  int64_t rows, share;
  size_t scratch;
};

// `some` runs rows first .. last - 1 of a Share.
template <class Work, class Some>
void share_out(const LayerKernels& kernels, const Work& work, int64_t rows, int64_t elements, int threads,
               size_t scratch, Some some) {
  if (rows < 1) return;
  const int64_t pieces = rows * elements < kAlone ? 1 : std::min<int64_t>(rows, int64_t{4} * threads);
  Share<Work> job{&kernels, &work, rows, (rows + pieces - 1) / pieces, scratch};
  run_on_threads((rows + job.share - 1) / job.share, pieces > 1 ? threads : 1, some, &job);
}

template <class Work>
int64_t end_of(const Share<Work>& job, int64_t first) {
  return std::min(first + job.share, job.rows);
}

void some_residual(void* context, int64_t index) {
  const auto& job = *static_cast<Share<Residual>*>(context);
  const int64_t first = index * job.share;
  job.kernels->residual(*job.work, first, end_of(job, first), thread_floats(job.scratch));
}

void some_turn(void* context, int64_t index) {
  const auto& job = *static_cast<Share<Turn>*>(context);
  const int64_t first = index * job.share;
  job.kernels->turn(*job.work, first, end_of(job, first), thread_floats(job.scratch));
}

void some_gate(void* context, int64_t index) {
  const auto& job = *static_cast<Share<Gate>*>(context);
  const int64_t first = index * job.share;
  job.kernels->gate(*job.work, first, end_of(job, first));
}

}  // namespace

const std::vector<const LayerKernels*>& layer_kernels() {
  static const std::vector<const LayerKernels*> found = find_kernels();
  return found;
}

void run_residual(const LayerKernels& kernels, const Residual& work, int64_t rows, int threads) {
  share_out(kernels, work, rows, work.width, threads, kernels.residual_scratch(work), some_residual);
}

void run_turn(const LayerKernels& kernels, const Turn& work, int64_t rows, int threads) {
  share_out(kernels, work, rows, work.row, threads, kernels.turn_scratch(work), some_turn);
}

void run_gate(const LayerKernels& kernels, const Gate& work, int64_t rows, int threads) {
  // An activation costs about four times what other elements do.
  share_out(kernels, work, rows, int64_t{4} * work.width, threads, 0, some_gate);
}

}  // namespace octavo
