// Batches of blocks between memory and files: moved in as few calls to the system as their places allow, and proven by
// header and checksum as soon as they are read. octavo/runtime/disk_format.py says what lies where and why; what does
// not succeed here at the first attempt is tried again there, block by block, and gets its reason.
#pragma once

#include <cstdint>

#include "crew.h"

namespace octavo {

constexpr int64_t kHeaderBytes = 512, kKeyBytes = 32;

enum State : uint8_t { kMoved = 0, kNot = 1, kStale = 2 };  // stale: served, and its file's last use is long ago

// `headings` is a header without what differs between blocks: key, age and checksums are zeros.
struct Blocks {
  int64_t count, bytes;
  const char* const* memory;
  const char* keys;  // kKeyBytes each
  const char* headings;
  State* states;
};

// A file of slots: behind `first` bytes segments of so many headers, and as many blocks that start every `stride` bytes.
struct SlotFile {
  int descriptor;
  int64_t first, per_segment, stride;

  int64_t header(int64_t slot) const {
    return first + slot / per_segment * per_segment * (kHeaderBytes + stride) + slot % per_segment * kHeaderBytes;
  }
  int64_t block(int64_t slot) const {
    return first + slot / per_segment * per_segment * (kHeaderBytes + stride) + per_segment * kHeaderBytes +
           slot % per_segment * stride;
  }
};

// Slots ascend. What is not in memory is asked of the disk all at once; the crew helps to wait, to copy and to hash.
void read_slots(Crew& crew, const SlotFile& file, const int64_t* slots, const Blocks& blocks);

// Slots ascend, and each is named once; blocks get ages from `age` on. Old headers go first and new ones come last.
void write_slots(const SlotFile& file, const int64_t* slots, const Blocks& blocks, int64_t age);

// Files of one block each, header first, in an open directory. A name is `prefix` and the key in hexadecimal.
struct Folder {
  int descriptor;
  const char* prefix;
  int64_t fresh_since;  // seconds: files used before are stale
};

void read_files(Crew& crew, const Folder& folder, const Blocks& blocks);

// Block i to the new file open as descriptors[i], which is closed if that succeeds.
void write_files(const int64_t* descriptors, const Blocks& blocks);

}  // namespace octavo
