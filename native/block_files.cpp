#include "block_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include "digest.h"

namespace octavo {
namespace {

constexpr int64_t kKeyAt = 16, kIdentityAt = kKeyAt + kKeyBytes, kAgeAt = 120, kChecksumAt = 128,
                  kPaddingAt = kChecksumAt + static_cast<int64_t>(kDigestBytes),
                  kOwnAt = kHeaderBytes - static_cast<int64_t>(kDigestBytes);
constexpr int64_t kShareBytes = 1 << 19;  // that a thread reads of a batch: still near when hashed, and soon done
constexpr int64_t kRunBytes = 4 << 20;    // written in one call: fewer walk through all the file's pages, more leave the caches
constexpr int64_t kRunBlocks = 448;       // with headers and padding no more pieces than a call may take
constexpr int64_t kWorthHelp = 1 << 19;   // of a batch: below, waking somebody takes longer
constexpr int64_t kApart = 16;            // headers that are read for nothing, rather than call the system once more
constexpr int64_t kAhead = 32 << 20;      // asked of the disk before they are waited for
constexpr int64_t kAskedAtOnce = 16;      // blocks for which one thread asks, before another may go on
constexpr int64_t kDirect = 48 << 10;     // lone blocks from here on pass by the system's pages, which come one by one
constexpr long kCachestat = 451;          // of Linux, on all processors: older headers do not name it
constexpr int kWaiting = 6;               // threads more while lone blocks come from the disk: it serves many at once

bool same(const char* head, const char* expected, int64_t from, int64_t to) {
  return std::memcmp(head + from, expected + from, static_cast<size_t>(to - from)) == 0;
}

bool digested(const char* data, int64_t bytes, const char* expected) {
  unsigned char found[kDigestBytes];
  digest(data, static_cast<size_t>(bytes), found);
  return std::memcmp(found, expected, kDigestBytes) == 0;
}

bool proven(const char* head, const Blocks& blocks, int64_t i) {
  const char* plain = blocks.headings;
  return same(head, plain, 0, kKeyAt) && std::memcmp(head + kKeyAt, blocks.keys + i * kKeyBytes, kKeyBytes) == 0 &&
         same(head, plain, kIdentityAt, kAgeAt) && same(head, plain, kPaddingAt, kOwnAt) &&
         digested(head, kOwnAt, head + kOwnAt) && digested(blocks.memory[i], blocks.bytes, head + kChecksumAt);
}

void make_header(char* head, const Blocks& blocks, int64_t i, int64_t age) {
  std::memcpy(head, blocks.headings, kHeaderBytes);
  std::memcpy(head + kKeyAt, blocks.keys + i * kKeyBytes, kKeyBytes);
  for (int byte = 0; byte < 8; byte++) head[kAgeAt + byte] = static_cast<char>(age >> (8 * byte));
  digest(blocks.memory[i], static_cast<size_t>(blocks.bytes), reinterpret_cast<unsigned char*>(head + kChecksumAt));
  digest(head, kOwnAt, reinterpret_cast<unsigned char*>(head + kOwnAt));
}

// One call, for everything or nothing: what is cut short is tried again by whoever asks why.
using Call = ssize_t (*)(int, const iovec*, int, off_t);

bool all_of(Call call, int descriptor, const iovec* parts, size_t count, int64_t at) {
  int64_t bytes = 0;
  for (size_t i = 0; i < count; i++) bytes += static_cast<int64_t>(parts[i].iov_len);
  return call(descriptor, parts, static_cast<int>(count), at) == bytes;
}

// What one thread needs for its calls.
struct Desk {
  std::vector<char> headers, padding;
  std::vector<iovec> parts;

  explicit Desk(int64_t padded) : padding(static_cast<size_t>(padded)) {}

  // Behind what is there: blocks first..last of one segment, neighbours in the file, with the padding between them.
  void lay_out(const Blocks& blocks, int64_t first, int64_t last, bool ends = true) {
    for (int64_t i = first; i < last; i++) {
      if (i > first && !ends_apart(blocks, i)) parts.back().iov_len += static_cast<size_t>(blocks.bytes);
      else parts.push_back({const_cast<char*>(blocks.memory[i]), static_cast<size_t>(blocks.bytes)});
      if (!padding.empty() && (i + 1 < last || !ends)) parts.push_back({padding.data(), padding.size()});
    }
  }

 private:
  bool ends_apart(const Blocks& blocks, int64_t i) const {
    return !padding.empty() || blocks.memory[i] != blocks.memory[i - 1] + blocks.bytes;
  }
};

// The end of a stretch that begins at block `first`: slots of one segment, so far apart at most.
int64_t stretch(const SlotFile& file, const int64_t* slots, int64_t first, int64_t end, int64_t apart) {
  int64_t last = first + 1;
  while (last < end && slots[last] > slots[last - 1] && slots[last] - slots[last - 1] <= apart &&
         slots[last] / file.per_segment == slots[first] / file.per_segment)
    last++;
  return last;
}

void mark(const Blocks& blocks, int64_t first, int64_t last, State state) {
  std::fill(blocks.states + first, blocks.states + last, state);
}

bool worth_help(const Blocks& blocks) { return blocks.count > 1 && blocks.count * blocks.bytes >= kWorthHelp; }

// A batch that is being read, by several threads.
class Reading {
 public:
  Reading(const SlotFile& file, const int64_t* slots, const Blocks& blocks)
      : file_(file), slots_(slots), blocks_(blocks) {}
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  ~Reading() {
    for (std::thread& thread : waiting_) thread.join();
    if (direct_ >= 0) close(direct_);
  }

  // Shares of it, until it is all begun.
  void take_part() {
    Desk desk(file_.stride - blocks_.bytes);
    const int64_t share = std::max<int64_t>(1, kShareBytes / file_.stride);
    for (;;) {
      const int64_t begin = next_.fetch_add(share, std::memory_order_relaxed);
      if (begin >= blocks_.count) return;
      const int64_t end = std::min(blocks_.count, begin + share);
      for (int64_t first = begin, last; first < end; first = last) {
        last = stretch(file_, slots_, first, end, kApart);
        read_stretch(first, last, desk);
      }
    }
  }

 private:
  // All that is wanted of a stretch: its headers in one call, its blocks in one for each run of neighbours.
  void read_stretch(int64_t first, int64_t last, Desk& desk) {
    desk.headers.resize(static_cast<size_t>((slots_[last - 1] - slots_[first] + 1) * kHeaderBytes));
    desk.parts.assign(1, {desk.headers.data(), desk.headers.size()});
    mark(blocks_, first, last, kNot);
    if (waits_.load(std::memory_order_relaxed)) ask_ahead(first);
    if (!fetch(desk.parts, file_.header(slots_[first]), first, first)) return;
    for (int64_t begin = first, end; begin < last; begin = end) {
      for (end = begin + 1; end < last && slots_[end] == slots_[end - 1] + 1; end++) {
      }
      desk.parts.clear();
      desk.lay_out(blocks_, begin, end);
      if (!fetch(desk.parts, file_.block(slots_[begin]), begin, end)) continue;
      for (int64_t i = begin; i < end; i++)
        if (proven(desk.headers.data() + (slots_[i] - slots_[first]) * kHeaderBytes, blocks_, i))
          blocks_.states[i] = kMoved;
    }
  }

  // Without waiting for the disk as long as nothing has to be waited for. Blocks first..end; none of headers.
  bool fetch(const std::vector<iovec>& parts, int64_t at, int64_t first, int64_t end) {
#if defined(RWF_NOWAIT) && defined(O_DIRECT)
    if (!waits_.load(std::memory_order_relaxed)) {
      if (all_of(at_hand, file_.descriptor, parts.data(), parts.size(), at)) return true;
      if (errno != EOPNOTSUPP) {
        waits_.store(true, std::memory_order_relaxed);
        ask_ahead(first);
      }
    }
    if (waits_.load(std::memory_order_relaxed) && end > first && alone(first, end)) {
      call_more();
      const int direct = direct_.load(std::memory_order_acquire);
      if (direct >= 0 && passes_by() && !in_memory(at, end - first) &&
          all_of(preadv, direct, parts.data(), parts.size(), at))
        return true;
    }
#endif
    return all_of(preadv, file_.descriptor, parts.data(), parts.size(), at);
  }

  // Of a long run the system reads ahead by itself, and in larger pieces.
  bool alone(int64_t first, int64_t end) const { return end == first + 1 || (end - first) * file_.stride < kShareBytes; }

  bool passes_by() const { return blocks_.bytes >= kDirect && blocks_.bytes == file_.stride; }

#if defined(RWF_NOWAIT) && defined(O_DIRECT)
  // Once: threads that wait for the disk like this one, and the file without the system's pages, if it can be had so.
  void call_more() {
    if (called_.exchange(true)) return;
    if (passes_by()) {
      const std::string name = "/proc/self/fd/" + std::to_string(file_.descriptor);
      direct_.store(open(name.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC), std::memory_order_release);
    }
    try {
      for (int i = 0; i < kWaiting; i++)
        waiting_.emplace_back([this] {
          try {
            take_part();
          } catch (...) {
            // Memory ran out: what it had taken counts as not moved.
          }
        });
    } catch (const std::exception&) {
      // The system grants no more threads: fewer wait.
    }
  }

  // Of a batch of which some is: that is not read again.
  bool in_memory(int64_t at, int64_t blocks) const {
    struct {
      uint64_t at, bytes;
    } range = {static_cast<uint64_t>(at), static_cast<uint64_t>(blocks * file_.stride)};
    struct {
      uint64_t cached, dirty, written, evicted, evicted_lately;
    } pages = {};
    return syscall(kCachestat, file_.descriptor, &range, &pages, 0u) == 0 &&
           pages.cached * static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) >= range.bytes;
  }

  static ssize_t at_hand(int descriptor, const iovec* parts, int count, off_t at) {
    errno = 0;
    return preadv2(descriptor, parts, count, at, RWF_NOWAIT);
  }
#endif

  void ask_ahead(int64_t first) {
#if defined(POSIX_FADV_WILLNEED)
    if (passes_by()) return;  // the threads that wait are as many as it needs
    const int64_t until = std::min(blocks_.count, first + std::max<int64_t>(1, kAhead / file_.stride));
    for (int64_t from = asked_.load(std::memory_order_relaxed); from < until;) {
      const int64_t to = std::min(until, from + kAskedAtOnce);
      if (!asked_.compare_exchange_weak(from, to, std::memory_order_relaxed)) continue;
      for (int64_t begin = std::max(from, first), end; begin < to; begin = end) {
        end = stretch(file_, slots_, begin, to, 1);
        if (alone(begin, end))
          posix_fadvise(file_.descriptor, file_.block(slots_[begin]), (end - begin) * file_.stride, POSIX_FADV_WILLNEED);
      }
      from = to;
    }
#endif
  }

  const SlotFile& file_;
  const int64_t* slots_;
  const Blocks& blocks_;
  std::atomic<int64_t> next_{0}, asked_{0};
  std::atomic<bool> waits_{false}, called_{false};
  std::atomic<int> direct_{-1};
  std::vector<std::thread> waiting_;
};

// A batch that is being written, by its caller alone: the file system lets one write to a file at a time, and what has
// just been hashed is written from the processor's cache, so that it comes from memory once.
class Writing {
 public:
  Writing(const SlotFile& file, const int64_t* slots, const Blocks& blocks, int64_t age)
      : file_(file), slots_(slots), blocks_(blocks), age_(age) {}

  void write_all() {
    Desk desk(file_.stride - blocks_.bytes);
    for (int64_t first = 0, last; first < blocks_.count; first = last) {
      last = run_from(first);
      desk.headers.resize(static_cast<size_t>((last - first) * kHeaderBytes));
      for (int64_t i = first; i < last; i++)
        make_header(desk.headers.data() + (i - first) * kHeaderBytes, blocks_, i, age_ + i);
      mark(blocks_, first, last, write_run(first, last, desk) ? kMoved : kNot);
    }
  }

 private:
  // The end of what is written in one call from block `first` on: neighbours of one segment, and of the segments behind
  // it those that are written whole, since the headers in between are zeroed by the same call.
  int64_t run_from(int64_t first) const {
    const int64_t most = std::min(kRunBlocks, std::max<int64_t>(1, kRunBytes / file_.stride));
    const int64_t end = std::min(blocks_.count, first + most);
    int64_t last = stretch(file_, slots_, first, end, 1);
    while (last + file_.per_segment <= end && slots_[last] == slots_[last - 1] + 1 && has_all_of(last))
      last += file_.per_segment;
    return last;
  }

  // Whether the batch has the whole segment that begins with block `first`.
  bool has_all_of(int64_t first) const {
    return stretch(file_, slots_, first, first + file_.per_segment, 1) == first + file_.per_segment;
  }

  // Neighbours all: old headers zeroed, blocks written, new headers written.
  bool write_run(int64_t first, int64_t last, Desk& desk) {
    desk.parts.clear();
    zeros_.resize(std::max(zeros_.size(), desk.headers.size()));
    int64_t at = file_.header(slots_[first]);
    for (int64_t begin = first, end; begin < last; begin = end) {
      end = stretch(file_, slots_, begin, last, 1);
      desk.parts.push_back({zeros_.data(), static_cast<size_t>((end - begin) * kHeaderBytes)});
      if (begin == first && end - begin < file_.per_segment) {  // others of its segment keep theirs
        if (!all_of(pwritev, file_.descriptor, desk.parts.data(), 1, at)) return false;
        desk.parts.clear();
        at = file_.block(slots_[first]);
      }
      desk.lay_out(blocks_, begin, end, end == last);
    }
    return all_of(pwritev, file_.descriptor, desk.parts.data(), desk.parts.size(), at) && publish(first, last, desk);
  }

  bool publish(int64_t first, int64_t last, Desk& desk) {
    bool all = true;
    for (int64_t begin = first, end; begin < last; begin = end) {
      end = stretch(file_, slots_, begin, last, 1);
      const iovec part = {desk.headers.data() + (begin - first) * kHeaderBytes,
                          static_cast<size_t>((end - begin) * kHeaderBytes)};
      all = all_of(pwritev, file_.descriptor, &part, 1, file_.header(slots_[begin])) && all;
    }
    return all;
  }

  const SlotFile& file_;
  const int64_t* slots_;
  const Blocks& blocks_;
  const int64_t age_;
  std::vector<char> zeros_;
};

// Of a block that has a file to itself.
struct WholeFile {
  iovec parts[2];
  WholeFile(char* head, const Blocks& blocks, int64_t i)
      : parts{{head, kHeaderBytes}, {const_cast<char*>(blocks.memory[i]), static_cast<size_t>(blocks.bytes)}} {}
};

void append_hex(std::string& name, const char* key) {
  for (int64_t i = 0; i < kKeyBytes; i++) {
    name += "0123456789abcdef"[(key[i] >> 4) & 15];
    name += "0123456789abcdef"[key[i] & 15];
  }
}

}  // namespace

void read_slots(Crew& crew, const SlotFile& file, const int64_t* slots, const Blocks& blocks) {
  Reading reading(file, slots, blocks);
  const auto act = [&reading] { reading.take_part(); };
  if (worth_help(blocks)) crew.run(act, act);
  else act();
}

void write_slots(const SlotFile& file, const int64_t* slots, const Blocks& blocks, int64_t age) {
  Writing(file, slots, blocks, age).write_all();
}

void read_files(Crew& crew, const Folder& folder, const Blocks& blocks) {
  std::atomic<int64_t> next{0};
  const auto act = [&] {
    std::string name;
    alignas(64) char head[kHeaderBytes];
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < blocks.count;) {
      blocks.states[i] = kNot;
      name = folder.prefix;
      append_hex(name, blocks.keys + i * kKeyBytes);
      const int opened = openat(folder.descriptor, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
      if (opened < 0) continue;
      struct stat facts;
      if (all_of(preadv, opened, WholeFile(head, blocks, i).parts, 2, 0) && proven(head, blocks, i) &&
          fstat(opened, &facts) == 0)
        blocks.states[i] = facts.st_mtime < folder.fresh_since ? kStale : kMoved;
      close(opened);
    }
  };
  if (worth_help(blocks)) crew.run(act, act);
  else act();
}

void write_files(const int64_t* descriptors, const Blocks& blocks) {
  alignas(64) char head[kHeaderBytes];
  for (int64_t i = 0; i < blocks.count; i++) {
    const int opened = static_cast<int>(descriptors[i]);
    make_header(head, blocks, i, 0);
    blocks.states[i] = kNot;
    if (!all_of(pwritev, opened, WholeFile(head, blocks, i).parts, 2, 0)) continue;
    close(opened);
    blocks.states[i] = kMoved;
  }
}

}  // namespace octavo
