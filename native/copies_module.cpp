// The Python face of copies between arenas and files. Memory comes as addresses, whose bounds the callers have checked:
// octavo/runtime/block_copy.py for arenas, disk_store.py for batches. Lengths that contradict each other are refused.
#include "copies_module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "block_files.h"
#include "copies.h"
#include "crew.h"
#include "digest.h"

namespace nb = nanobind;

namespace octavo {
namespace {

using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using States = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Address; slots of a slab; bytes of a slab.
Slots side(const std::vector<int64_t>& of, int64_t block_bytes) {
  if (of.size() != 3 || of[1] < 1 || block_bytes < 1 || of[1] * block_bytes > of[2])
    throw std::invalid_argument("a side is an address, the slots of a slab and its bytes");
  return {reinterpret_cast<char*>(of[0]), of[1], of[2], block_bytes};
}

void copy(const std::vector<int64_t>& to, const std::vector<int64_t>& from, int64_t block_bytes, Numbers sources,
          Numbers targets) {
  if (sources.shape(0) != targets.shape(0)) throw std::invalid_argument("as many sources as targets are wanted");
  const Slots written = side(to, block_bytes), read = side(from, block_bytes);
  nb::gil_scoped_release unlocked;
  copy_blocks(written, read, sources.data(), targets.data(), static_cast<int64_t>(sources.shape(0)));
}

Blocks blocks_of(const Numbers& memory, int64_t bytes, const nb::bytes& keys, const nb::bytes& headings,
                 const States& states) {
  const size_t count = memory.shape(0);
  if (states.shape(0) != count || keys.size() != count * kKeyBytes || headings.size() != size_t{kHeaderBytes})
    throw std::invalid_argument("addresses, keys and states differ in number, or the header is no header");
  if (bytes < static_cast<int64_t>(kLeastDigested)) throw std::invalid_argument("blocks have 241 bytes or more");
  static_assert(sizeof(int64_t) == sizeof(char*), "addresses are handed on as 64-bit numbers");
  return {static_cast<int64_t>(count), bytes, reinterpret_cast<const char* const*>(memory.data()), keys.c_str(),
          headings.c_str(), reinterpret_cast<State*>(states.data())};
}

// Descriptor; bytes before the first segment; slots of a segment; bytes from one block to the next.
SlotFile file_of(const std::vector<int64_t>& of, const Numbers& slots, const Blocks& blocks) {
  if (of.size() != 4 || of[2] < 1 || of[3] < blocks.bytes || slots.shape(0) != static_cast<size_t>(blocks.count))
    throw std::invalid_argument("a file is a descriptor, its first bytes, the slots of a segment and a stride");
  return {static_cast<int>(of[0]), of[1], of[2], of[3]};
}

}  // namespace

void bind_copies(nb::module_& m) {
  m.attr("copies_version") = 2;  // of the calls below: octavo/runtime/disk_batch.py leaves others alone
  m.def("digest", [](const nb::bytes& data) {
    if (data.size() < kLeastDigested) throw std::invalid_argument("what is digested has 241 bytes or more");
    unsigned char found[kDigestBytes];
    digest(data.c_str(), data.size(), found);
    return nb::bytes(reinterpret_cast<const char*>(found), kDigestBytes);
  }, "XXH3 of 128 bits.");
  m.def("copy_blocks", &copy);
  nb::class_<Crew>(m, "Crew", "Threads that help with batches, so many beside the caller.")
      .def("__init__", [](Crew* made, int helpers) {
        if (helpers < 0 || helpers > 64) throw std::invalid_argument("a crew has 0 to 64 helpers");
        new (made) Crew(helpers);
      })
      .def("close", &Crew::close, nb::call_guard<nb::gil_scoped_release>());
  m.def("read_slots", [](Crew& crew, const std::vector<int64_t>& file, Numbers slots, Numbers memory, int64_t bytes,
                         nb::bytes keys, nb::bytes headings, States states) {
    const Blocks blocks = blocks_of(memory, bytes, keys, headings, states);
    const SlotFile pool = file_of(file, slots, blocks);
    nb::gil_scoped_release unlocked;
    read_slots(crew, pool, slots.data(), blocks);
  });
  m.def("write_slots", [](const std::vector<int64_t>& file, Numbers slots, Numbers memory, int64_t bytes, nb::bytes keys,
                          nb::bytes headings, States states, int64_t age) {
    const Blocks blocks = blocks_of(memory, bytes, keys, headings, states);
    const SlotFile pool = file_of(file, slots, blocks);
    nb::gil_scoped_release unlocked;
    write_slots(pool, slots.data(), blocks, age);
  });
  m.def("read_files", [](Crew& crew, int descriptor, const std::string& prefix, int64_t fresh_since, Numbers memory,
                         int64_t bytes, nb::bytes keys, nb::bytes headings, States states) {
    const Blocks blocks = blocks_of(memory, bytes, keys, headings, states);
    nb::gil_scoped_release unlocked;
    read_files(crew, {descriptor, prefix.c_str(), fresh_since}, blocks);
  });
  m.def("write_files", [](Numbers descriptors, Numbers memory, int64_t bytes, nb::bytes keys, nb::bytes headings,
                          States states) {
    const Blocks blocks = blocks_of(memory, bytes, keys, headings, states);
    if (descriptors.shape(0) != memory.shape(0)) throw std::invalid_argument("a file for each block is wanted");
    nb::gil_scoped_release unlocked;
    write_files(descriptors.data(), blocks);
  });
}

}  // namespace octavo
