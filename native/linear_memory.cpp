#include "linear_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <mutex>
#include <new>

namespace octavo {
namespace {

constexpr size_t kHuge = size_t{2} << 20;   // bytes of a huge page
constexpr size_t kPiece = size_t{32} << 20;  // what is not used is never touched, so it takes address space alone

struct Mapped {
  void* start;
  size_t bytes;
  explicit Mapped(size_t room) : bytes(room + kHuge) {
    start = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    madvise(start, bytes, MADV_HUGEPAGE);  // where it is refused, small pages serve as well
#endif
  }
  ~Mapped() { munmap(start, bytes); }
  Mapped(const Mapped&) = delete;
  char* aligned() const { return static_cast<char*>(start) + (kHuge - reinterpret_cast<uintptr_t>(start) % kHuge); }
};

std::mutex mutex;
std::weak_ptr<Mapped> last;  // the piece that is being filled, for as long as a matrix lies in it
size_t filled = 0, room = 0;

}  // namespace

char* WeightMemory::of(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  std::lock_guard<std::mutex> held(mutex);
  std::shared_ptr<Mapped> piece = last.lock();
  if (!piece || filled + bytes > room) {
    room = bytes > kPiece ? (bytes + kHuge - 1) / kHuge * kHuge : kPiece;
    piece = std::make_shared<Mapped>(room);
    last = piece;
    filled = 0;
  }
  start_ = piece->aligned() + filled;
  filled += bytes;
  piece_ = std::move(piece);
  return start_;
}

}  // namespace octavo
