#include "threads.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
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
  std::atomic<bool> failed{false};
  std::exception_ptr thrown;  // the first; read when nobody takes items any more
};

// Nothing is thrown out of here: neither the runtime nor a job that others are inside of could be left that way.
// Items that nobody has taken by then are not taken.
void take(void* argument) {
  Work& work = *static_cast<Work*>(argument);
  try {
    for (int64_t i; (i = work.next.fetch_add(1, std::memory_order_relaxed)) < work.count;) work.body(work.context, i);
  } catch (...) {
    if (!work.failed.exchange(true)) work.thrown = std::current_exception();
    work.next.store(work.count, std::memory_order_relaxed);
  }
}

// Threads that stand by. Those that find a job open enter, look again whether it still is, and take items; the leader
// closes a job once its items are taken and waits for those inside alone, so that the job's fields change while nobody
// reads them.
struct Team {
  void (*lead)(void*);
  void* context;
  std::exception_ptr thrown;
  alignas(64) std::atomic<Work*> open{nullptr};
  alignas(64) std::atomic<int> inside{0};
  std::atomic<bool> over{false};
};

thread_local bool opens = false;     // this thread is about to lead a team
thread_local Team* led = nullptr;

constexpr int kSpins = 4000;  // pauses, some tens of microseconds; after them the core is offered to others

inline void pause_briefly(int& spins) {
  if (++spins > kSpins) {
    std::this_thread::yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void stand_by(Team& team) {
  for (int spins = 0; !team.over.load(std::memory_order_acquire);) {
    if (!team.open.load(std::memory_order_relaxed)) {
      pause_briefly(spins);
      continue;
    }
    team.inside.fetch_add(1);
    if (Work* work = team.open.load()) {
      take(work);
      spins = 0;
    }
    team.inside.fetch_sub(1, std::memory_order_release);
  }
}

void lead_or_stand_by(void* argument) {
  Team& team = *static_cast<Team*>(argument);
  if (!opens) return stand_by(team);
  opens = false;
  led = &team;
  try {
    team.lead(team.context);
  } catch (...) {
    team.thrown = std::current_exception();
  }
  led = nullptr;
  team.over.store(true, std::memory_order_release);
}

void run_in_team(Team& team, Work& work) {
  team.open.store(&work);
  take(&work);
  team.open.store(nullptr);
  for (int spins = 0; team.inside.load() != 0;) pause_briefly(spins);
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
  if (threads > 1 && led) run_in_team(*led, work);
  else if (threads > 1 && parallel()) parallel()(take, &work, threads, 0);
  else take(&work);
  if (work.thrown) std::rethrow_exception(work.thrown);
}

void with_team(int threads, void (*body)(void*), void* context) {
  if (threads < 2 || led || !parallel()) return body(context);
  Team team{body, context, nullptr};
  opens = true;
  parallel()(lead_or_stand_by, &team, static_cast<unsigned>(threads), 0);
  if (team.thrown) std::rethrow_exception(team.thrown);
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
