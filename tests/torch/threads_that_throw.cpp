// Items that throw on one thread while the other holds an item: the job ends with the exception once both have put down
// theirs, and the next job runs as if nothing had been. Prints a line for each; what is left open ends the program.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <thread>

#include "threads.h"

using octavo::run_on_threads;

namespace {

enum class Who { nobody, leader, other, both };
constexpr const char* kNames[] = {"nobody", "leader", "other", "both"};
constexpr int64_t kItems = 64;
constexpr int kThreads = 2;
const std::thread::id first_thread = std::this_thread::get_id();

struct Items {
  Who who;
  std::atomic<int> come{0}, held{0}, done{0};
};

// The first two items are held by one thread each, for as long as it takes the other to come.
void one(void* context, int64_t) {
  Items& items = *static_cast<Items*>(context);
  items.held++;
  items.come++;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (items.come < kThreads && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  const bool leads = std::this_thread::get_id() == first_thread;
  if (items.who == Who::both || (items.who != Who::nobody && leads == (items.who == Who::leader))) {
    items.held--;
    throw std::bad_alloc();
  }
  if (items.who != Who::nobody) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  items.held--;
  items.done++;
}

void jobs(const char* where) {
  for (Who who : {Who::nobody, Who::leader, Who::other, Who::both, Who::nobody}) {
    Items items;
    items.who = who;
    bool thrown = false;
    try {
      run_on_threads(kItems, kThreads, one, &items);
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    const bool right = items.held == 0 && (who == Who::nobody ? !thrown && items.done == kItems : thrown);
    std::printf("%s, %s: %s\n", where, kNames[static_cast<int>(who)], right ? "right" : "wrong");
    std::fflush(stdout);
  }
}

}  // namespace

int main() {
  std::atomic<int> threads{0};
#pragma omp parallel num_threads(kThreads)
  threads++;
  if (threads < kThreads || !*octavo::thread_runtime()) return 3;
  jobs("runtime");
  try {
    octavo::with_team(kThreads, [](void*) { jobs("team"); throw std::runtime_error("out of the team"); }, nullptr);
  } catch (const std::runtime_error& error) {
    std::puts(error.what());
  }
  octavo::with_team(kThreads, [](void*) { jobs("again"); }, nullptr);
}
