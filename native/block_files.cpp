#include "block_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "digest.h"

namespace octavo {
namespace {

constexpr int64_t kKeyAt = 16, kIdentityAt = kKeyAt + kKeyBytes, kAgeAt = 120, kChecksumAt = 128,
                  kPaddingAt = kChecksumAt + static_cast<int64_t>(kDigestBytes),
                  kOwnAt = kHeaderBytes - static_cast<int64_t>(kDigestBytes);
constexpr int64_t kRunBytes = 1 << 20;  // of more than one block: a thread's share, and still near when it is hashed
constexpr int64_t kApart = 16;          // headers that are read for nothing, rather than call the system once more

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
};

// Blocks first..last, neighbours in the file, with the padding between them.
bool move(Call call, const SlotFile& file, int64_t slot, const Blocks& blocks, int64_t first, int64_t last, Desk& desk) {
  desk.parts.clear();
  const bool padded = !desk.padding.empty();
  for (int64_t i = first; i < last; i++) {
    if (i > first && padded) desk.parts.push_back({desk.padding.data(), desk.padding.size()});
    if (i > first && !padded && blocks.memory[i] == blocks.memory[i - 1] + blocks.bytes)
      desk.parts.back().iov_len += static_cast<size_t>(blocks.bytes);
    else desk.parts.push_back({const_cast<char*>(blocks.memory[i]), static_cast<size_t>(blocks.bytes)});
  }
  return all_of(call, file.descriptor, desk.parts.data(), desk.parts.size(), file.block(slot));
}

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

// All that is wanted of a stretch: its headers in one call, its blocks in one for each run of neighbours.
void read_stretch(const SlotFile& file, const int64_t* slots, const Blocks& blocks, int64_t first, int64_t last,
                  Desk& desk) {
  desk.headers.resize(static_cast<size_t>((slots[last - 1] - slots[first] + 1) * kHeaderBytes));
  const iovec all = {desk.headers.data(), desk.headers.size()};
  mark(blocks, first, last, kNot);
  if (!all_of(preadv, file.descriptor, &all, 1, file.header(slots[first]))) return;
  for (int64_t begin = first, end; begin < last; begin = end) {
    for (end = begin + 1; end < last && slots[end] == slots[end - 1] + 1; end++) {
    }
    if (!move(preadv, file, slots[begin], blocks, begin, end, desk)) continue;
    for (int64_t i = begin; i < end; i++)
      if (proven(desk.headers.data() + (slots[i] - slots[first]) * kHeaderBytes, blocks, i)) blocks.states[i] = kMoved;
  }
}

// Neighbours all: old headers zeroed, blocks written, new headers written.
bool write_stretch(const SlotFile& file, const int64_t* slots, const Blocks& blocks, int64_t first, int64_t last,
                   int64_t age, Desk& desk) {
  desk.headers.assign(static_cast<size_t>((last - first) * kHeaderBytes), 0);
  const iovec all = {desk.headers.data(), desk.headers.size()};
  if (!all_of(pwritev, file.descriptor, &all, 1, file.header(slots[first]))) return false;
  for (int64_t i = first; i < last; i++)
    make_header(desk.headers.data() + (i - first) * kHeaderBytes, blocks, i, age + i);
  return move(pwritev, file, slots[first], blocks, first, last, desk) &&
         all_of(pwritev, file.descriptor, &all, 1, file.header(slots[first]));
}

// Shares of a batch, until it is all begun.
template <class Act>
void each_share(const SlotFile& file, const Blocks& blocks, int64_t* next, Act act) {
  const int64_t share = std::max<int64_t>(1, kRunBytes / file.stride);
  for (;;) {
    const int64_t first = __atomic_fetch_add(next, share, __ATOMIC_RELAXED);
    if (first >= blocks.count) return;
    act(first, std::min(blocks.count, first + share));
  }
}

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

void read_slots(const SlotFile& file, const int64_t* slots, const Blocks& blocks, int64_t* next) {
  Desk desk;
  desk.padding.resize(static_cast<size_t>(file.stride - blocks.bytes));
  each_share(file, blocks, next, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin, last; first < end; first = last) {
      last = stretch(file, slots, first, end, kApart);
      read_stretch(file, slots, blocks, first, last, desk);
    }
  });
}

void write_slots(const SlotFile& file, const int64_t* slots, const Blocks& blocks, int64_t age, int64_t* next) {
  Desk desk;
  desk.padding.resize(static_cast<size_t>(file.stride - blocks.bytes));
  each_share(file, blocks, next, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin, last; first < end; first = last) {
      last = stretch(file, slots, first, end, 1);
      mark(blocks, first, last, write_stretch(file, slots, blocks, first, last, age, desk) ? kMoved : kNot);
    }
  });
}

void read_files(const Folder& folder, const Blocks& blocks, int64_t* next) {
  std::string name;
  alignas(64) char head[kHeaderBytes];
  for (;;) {
    const int64_t i = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    if (i >= blocks.count) return;
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
