// Written from the published description of the algorithm: eight lanes of 64 bits, stripes of 64 bytes, a scramble after
// every 1,024, and a merge at the end. Data is added to the neighbouring lane and multiplied into its own.
#include "digest.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

constexpr size_t kStripe = 64, kLanes = 8, kStripesAtOnce = 16, kSecretBytes = 192;
constexpr size_t kLastSecret = kSecretBytes - kStripe - 7, kLowSecret = 11, kHighSecret = kSecretBytes - kStripe - 11;
constexpr uint64_t kPrime32[] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u,
                                 0x27D4EB2F165667C5u};

alignas(64) constexpr unsigned char kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d,
    0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0,
    0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0,
    0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b,
    0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac,
    0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51,
    0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34,
    0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49,
    0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8,
    0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b,
    0x40, 0x7e};

constexpr const unsigned char* kScrambling = kSecret + kSecretBytes - kStripe;

uint64_t word(const void* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  value = __builtin_bswap64(value);
#endif
  return value;
}

void stripe(uint64_t* lanes, const char* data, const unsigned char* secret) {
  for (size_t i = 0; i < kLanes; i++) {
    const uint64_t value = word(data + 8 * i), mixed = value ^ word(secret + 8 * i);
    lanes[i ^ 1] += value;
    lanes[i] += (mixed & 0xFFFFFFFFu) * (mixed >> 32);
  }
}

// All stripes but the last: each with a secret that begins 8 bytes further on, and a scramble after every sixteenth.
using Run = void (*)(uint64_t* lanes, const char* data, size_t stripes);

void run_plain(uint64_t* lanes, const char* data, size_t stripes) {
  for (size_t n = 0; n < stripes; n++) {
    stripe(lanes, data + n * kStripe, kSecret + n % kStripesAtOnce * 8);
    if (n % kStripesAtOnce != kStripesAtOnce - 1) continue;
    for (size_t i = 0; i < kLanes; i++)
      lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ word(kScrambling + 8 * i)) * kPrime32[0];
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void run_avx2(uint64_t* lanes, const char* data, size_t stripes) {
  const __m256i prime = _mm256_set1_epi64x(static_cast<int64_t>(kPrime32[0]));
  __m256i* kept = reinterpret_cast<__m256i*>(lanes);
  __m256i sums[2] = {_mm256_loadu_si256(kept), _mm256_loadu_si256(kept + 1)};
  for (size_t first = 0; first < stripes; first += kStripesAtOnce) {
    const size_t count = stripes - first < kStripesAtOnce ? stripes - first : kStripesAtOnce;
#pragma GCC unroll 4
    for (size_t n = 0; n < count; n++) {
      const __m256i* read = reinterpret_cast<const __m256i*>(data + (first + n) * kStripe);
      const __m256i* secret = reinterpret_cast<const __m256i*>(kSecret + 8 * n);
      for (int half = 0; half < 2; half++) {
        const __m256i value = _mm256_loadu_si256(read + half);
        const __m256i mixed = _mm256_xor_si256(value, _mm256_loadu_si256(secret + half));
        const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
        const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
        sums[half] = _mm256_add_epi64(sums[half], _mm256_add_epi64(product, swapped));
      }
    }
    for (int half = 0; half < 2 && count == kStripesAtOnce; half++) {
      const __m256i secret = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kScrambling) + half);
      const __m256i mixed =
          _mm256_xor_si256(_mm256_xor_si256(sums[half], _mm256_srli_epi64(sums[half], 47)), secret);
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
      sums[half] = _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
    }
  }
  _mm256_storeu_si256(kept, sums[0]);
  _mm256_storeu_si256(kept + 1, sums[1]);
}
#endif

Run fastest() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return run_avx2;
#endif
  return run_plain;
}

const Run kRun = fastest();

uint64_t merged(const uint64_t* lanes, const unsigned char* secret, uint64_t sum) {
  for (size_t i = 0; i < kLanes; i += 2) {
    const auto product = static_cast<unsigned __int128>(lanes[i] ^ word(secret + 8 * i)) *
                         (lanes[i + 1] ^ word(secret + 8 * i + 8));
    sum += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  sum = (sum ^ (sum >> 37)) * 0x165667919E3779F9u;
  return sum ^ (sum >> 32);
}

void put(uint64_t value, unsigned char* out) {
  for (int i = 0; i < 8; i++) out[i] = static_cast<unsigned char>(value >> (56 - 8 * i));
}

}  // namespace

void digest(const char* data, size_t bytes, unsigned char* out) {
  alignas(64) uint64_t lanes[kLanes] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                                        kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
  kRun(lanes, data, (bytes - 1) / kStripe);
  stripe(lanes, data + bytes - kStripe, kSecret + kLastSecret);
  put(merged(lanes, kSecret + kHighSecret, ~(bytes * kPrime64[1])), out);
  put(merged(lanes, kSecret + kLowSecret, bytes * kPrime64[0]), out + 8);
}

}  // namespace octavo
