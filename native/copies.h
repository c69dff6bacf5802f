// Whole blocks copied from one arena to another, as many as a caller names, in one call.
#pragma once

#include <cstdint>

namespace octavo {

// Where the slots of one group lie in an arena: so many to a slab, and what is left of the slab is padding.
struct Slots {
  char* memory;
  int64_t per_slab, slab_bytes, block_bytes;

  char* at(int64_t slot) const { return memory + slot / per_slab * slab_bytes + slot % per_slab * block_bytes; }
};

// Slot sources[i] of `from` to slot targets[i] of `to`, in that order. The arenas must not overlap; nothing is checked.
void copy_blocks(const Slots& to, const Slots& from, const int64_t* sources, const int64_t* targets, int64_t count);

}  // namespace octavo
