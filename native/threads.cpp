#include "threads.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#if defined(__linux__)
#include <link.h>
#include <sched.h>
#endif

namespace octavo {
namespace {

// The entry point that GCC's OpenMP has, and Intel's and LLVM's beside their own.
using Parallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

#if defined(__linux__)
int look_into(dl_phdr_info* info, size_t, void* found) {
  const char* name = info->dlpi_name;
  if (!name || (!std::strstr(name, "gomp") && !std::strstr(name, "omp5") && !std::strstr(name, "libomp"))) return 0;
  void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return 0;
  *static_cast<void**>(found) = dlsym(library, "GOMP_parallel");
  return *static_cast<void**>(found) != nullptr;
}
#endif

Parallel find_parallel() {
  void* symbol = dlsym(RTLD_DEFAULT, "GOMP_parallel");
#if defined(__linux__)
  if (!symbol) dl_iterate_phdr(look_into, &symbol);
#endif
  return reinterpret_cast<Parallel>(symbol);
}

Parallel parallel() {
  static const Parallel found = find_parallel();
  return found;
}

struct Work {
  int64_t count;
  void (*body)(void*, int64_t);
  void* context;
  std::atomic<int64_t> next{0};
};

void take(void* argument) {
  Work& work = *static_cast<Work*>(argument);
  for (int64_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.count;) work.body(work.context, i);
}

std::atomic<size_t> held_bytes{0};

struct Floats {
  float* start = nullptr;
  size_t size = 0;
  void let_go() {
    std::free(start);
    held_bytes -= size * sizeof(float);
    start = nullptr;
    size = 0;
  }
  ~Floats() { let_go(); }
};

}  // namespace

const char* thread_runtime() {
  Dl_info info;
  Parallel found = parallel();
  return found && dladdr(reinterpret_cast<void*>(found), &info) ? info.dli_fname : "";
}

void run_on_threads(int64_t count, int threads, void (*body)(void*, int64_t), void* context) {
  Work work{count, body, context};
  if (threads > count) threads = static_cast<int>(count);
  if (threads > 1 && parallel()) parallel()(take, &work, threads, 0);
  else take(&work);
}

float* thread_floats(size_t count, Use use) {
  thread_local Floats both[2];
  Floats& own = both[static_cast<int>(use)];
  if (own.size < count) {
    own.let_go();
    const size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
    own.start = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (!own.start) throw std::bad_alloc();
    own.size = bytes / sizeof(float);
    held_bytes += bytes;
  }
  return own.start;
}

size_t thread_bytes() { return held_bytes.load(); }

#if defined(__linux__)
namespace {

struct Pins {
  const std::vector<int>* cores;
  std::atomic<int> arrived{0}, bound{0};
};

// Waits until every thread is here, so that each takes exactly one core.
void pin_one(void* argument) {
  Pins& pins = *static_cast<Pins*>(argument);
  const int wanted = static_cast<int>(pins.cores->size()), own = pins.arrived++;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (pins.arrived < wanted)
    if (std::chrono::steady_clock::now() > end) return;
  cpu_set_t one;
  CPU_ZERO(&one);
  if (own >= wanted || (*pins.cores)[own] < 0 || (*pins.cores)[own] >= CPU_SETSIZE) return;
  CPU_SET((*pins.cores)[own], &one);
  if (sched_setaffinity(0, sizeof(one), &one) == 0) pins.bound++;
}

}  // namespace

bool pin_threads(const std::vector<int>& cores) {
  Pins pins{&cores};
  if (cores.size() > 1 && parallel()) parallel()(pin_one, &pins, static_cast<unsigned>(cores.size()), 0);
  else pin_one(&pins);
  return pins.bound == static_cast<int>(cores.size());
}
#else
bool pin_threads(const std::vector<int>&) { return false; }
#endif

}  // namespace octavo
