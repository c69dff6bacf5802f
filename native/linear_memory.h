// Memory for packed weights: parts of large pieces that the system is asked to back with huge pages. A step reads all
// weights once, and with small pages much of that time goes into finding where each page lies.
#pragma once

#include <cstddef>
#include <memory>

namespace octavo {

class WeightMemory {
 public:
  // Zeros, aligned to 64 bytes; what this held before is let go. Throws std::bad_alloc, and then nothing changes.
  char* of(size_t bytes);
  char* start() const { return start_; }

 private:
  std::shared_ptr<void> piece_;  // returned to the system with the last matrix that lies in it
  char* start_ = nullptr;
};

}  // namespace octavo
