// The checksum of blocks and headers on disk: XXH3 of 128 bits, as the package xxhash computes it in Python.
#pragma once

#include <cstddef>

namespace octavo {

constexpr size_t kDigestBytes = 16;
constexpr size_t kLeastDigested = 241;  // shorter inputs have rules of their own, which nothing here needs

// Of `bytes` >= kLeastDigested bytes, the more significant half first.
void digest(const char* data, size_t bytes, unsigned char* out);

}  // namespace octavo
