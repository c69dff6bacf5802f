#include "threads.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#if defined(__linux__)
#include <link.h>
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

struct Floats {
  float* start = nullptr;
  size_t size = 0;
  ~Floats() { std::free(start); }
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

float* thread_floats(size_t count) {
  thread_local Floats own;
  if (own.size < count) {
    std::free(own.start);
    own.start = nullptr;
    own.size = 0;
    const size_t bytes = (count * sizeof(float) + 63) / 64 * 64;
    own.start = static_cast<float*>(std::aligned_alloc(64, bytes));
    if (!own.start) throw std::bad_alloc();
    own.size = bytes / sizeof(float);
  }
  return own.start;
}

}  // namespace octavo
