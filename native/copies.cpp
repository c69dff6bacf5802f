#include "copies.h"

#include <cstddef>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace octavo {
namespace {

#if defined(__x86_64__)
constexpr int64_t kPastCaches = 4 << 20;  // bytes: what is copied is not worth pushing everything else out for

// Past the caches, and with the head of what is read next on its way: processors look ahead within a page, not beyond
// the end of a block.
void stream(char* to, const char* from, int64_t bytes, const char* next) {
  for (int64_t at = 0; at < bytes; at += 64) {
    _mm_prefetch(next + at, _MM_HINT_T0);
    const __m128i* read = reinterpret_cast<const __m128i*>(from + at);
    const __m128i a = _mm_loadu_si128(read), b = _mm_loadu_si128(read + 1), c = _mm_loadu_si128(read + 2),
                  d = _mm_loadu_si128(read + 3);
    __m128i* written = reinterpret_cast<__m128i*>(to + at);
    _mm_stream_si128(written, a);
    _mm_stream_si128(written + 1, b);
    _mm_stream_si128(written + 2, c);
    _mm_stream_si128(written + 3, d);
  }
}
#endif

}  // namespace

void copy_blocks(const Slots& to, const Slots& from, const int64_t* sources, const int64_t* targets, int64_t count) {
  int64_t bytes = 0;
  for (int64_t i = 0, last; i < count; i = last) {
    char* written = to.at(targets[i]);
    const char* read = from.at(sources[i]);
    bytes = from.block_bytes;
    for (last = i + 1; last < count && to.at(targets[last]) == written + bytes && from.at(sources[last]) == read + bytes;
         last++)
      bytes += from.block_bytes;
#if defined(__x86_64__)
    const bool far = count * from.block_bytes >= kPastCaches;
    if (far && reinterpret_cast<uintptr_t>(written) % 16 == 0 && bytes % 64 == 0) {
      stream(written, read, bytes, last < count ? from.at(sources[last]) : read + bytes);
      continue;
    }
#endif
    std::memcpy(written, read, static_cast<size_t>(bytes));
  }
#if defined(__x86_64__)
  _mm_sfence();  // streamed bytes may be seen late by others; those who wait for this call must see them
#endif
}

}  // namespace octavo
