#include "crew.h"

#include <unistd.h>

#include <chrono>
#include <system_error>

namespace octavo {
namespace {

constexpr std::chrono::microseconds kNearlyDone{50};  // to sleep and be woken takes longer than a helper's last share

}  // namespace

void Crew::run(const std::function<void()>& mine, const std::function<void()>& theirs) {
  struct Ending {
    Crew& crew;
    ~Ending() { crew.end(); }
  } ending{*this};
  begin(theirs);
  mine();
}

void Crew::begin(const std::function<void()>& theirs) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  if (threads_.empty()) process_ = getpid();
  while (static_cast<int>(threads_.size()) < helpers_) {
    try {
      threads_.emplace_back([this] { help(); });
    } catch (const std::system_error&) {
      break;  // the system grants no more threads: fewer help
    }
  }
  theirs_ = &theirs;
  wanted_ = static_cast<int>(threads_.size());
  wake_.notify_all();
}

void Crew::end() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    wanted_ = 0;
  }
  const auto until = std::chrono::steady_clock::now() + kNearlyDone;
  while (working_.load(std::memory_order_acquire) && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return working_.load(std::memory_order_acquire) == 0; });
  theirs_ = nullptr;
}

void Crew::help() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return closed_ || wanted_ > 0; });
    if (closed_) return;
    wanted_--;
    working_.fetch_add(1, std::memory_order_relaxed);
    const std::function<void()>& act = *theirs_;
    lock.unlock();
    try {
      act();
    } catch (...) {
      // Memory ran out: what it had taken counts as not moved, and is moved by whoever asks why.
    }
    lock.lock();
    if (working_.fetch_sub(1, std::memory_order_release) == 1) idle_.notify_all();
  }
}

void Crew::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    wake_.notify_all();
  }
  for (std::thread& thread : threads_)
    if (process_ == getpid()) thread.join();
    else thread.detach();
  threads_.clear();
}

}  // namespace octavo
