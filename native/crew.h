// A few threads that help with a batch of blocks: they wait for files and hash while the caller does the same. They are
// no part of the pool that computes, are started by the first batch that is worth it, and hold no lock of Python's, so
// that a long step of the engine delays none of them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

class Crew {
 public:
  explicit Crew(int helpers) : helpers_(helpers) {}
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;
  ~Crew() { close(); }

  // `mine` here, and `theirs` once on each helper that is awake before `mine` ends: none has to be. Returns when nobody
  // is at it any more. What a helper throws ends its part and nothing else. One caller at a time.
  void run(const std::function<void()>& mine, const std::function<void()>& theirs);

  // Ends the helpers; what comes later is done by its caller alone.
  void close();

 private:
  void begin(const std::function<void()>& theirs);
  void end();
  void help();

  const int helpers_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::thread> threads_;
  const std::function<void()>* theirs_ = nullptr;
  int wanted_ = 0;
  std::atomic<int> working_{0};
  bool closed_ = false;
  long process_ = 0;  // in which the helpers were started: a fork has none
};

}  // namespace octavo
