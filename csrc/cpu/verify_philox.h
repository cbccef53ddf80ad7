// Philox-4x32-10 (Salmon et al. 2011), and uniforms from its words.
#pragma once

#include <cstdint>

namespace specdec {
namespace verification {

struct Philox {
  uint32_t words[4];

  Philox(uint64_t seed, uint64_t position, uint32_t block)
      : words{block, 0, static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32)} {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = words[0] * uint64_t{0xD2511F53}, b = words[2] * uint64_t{0xCD9E8D57};
      words[0] = static_cast<uint32_t>(b >> 32) ^ words[1] ^ key0;
      words[2] = static_cast<uint32_t>(a >> 32) ^ words[3] ^ key1;
      words[1] = static_cast<uint32_t>(b);
      words[3] = static_cast<uint32_t>(a);
      key0 += 0x9E3779B9;
      key1 += 0xBB67AE85;
    }
  }

  // 23 bits and a half step: exact in fp32, never 0 and never 1.
  float uniform(int i) const { return static_cast<float>((words[i] >> 9) * 2 + 1) * 0x1p-24f; }
};

}  // namespace verification
}  // namespace specdec
