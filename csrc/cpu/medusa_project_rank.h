// The k best of a stream of logits. Value and id are one integer, ordered first by value, then by ascending id; NaN is
// below everything else, and the two zeros are equal.
#pragma once

#include "cpu/vec.h"

namespace specdec {
namespace medusa {
namespace {

constexpr int64_t kNoKey = INT64_MIN;  // below every key

SPECDEC_INLINE int64_t key_of(float value, int64_t id) {
  int32_t order = bit_cast<int32_t>(value + 0.0f);  // -0 + 0 = 0
  if (order < 0) order ^= INT32_MAX;
  if (value != value) order = INT32_MIN;
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(order)) << 32 |
                              (UINT32_MAX - static_cast<uint32_t>(id)));
}

SPECDEC_INLINE float value_of(int64_t key) {
  int32_t order = static_cast<int32_t>(key >> 32);
  if (order < 0) order ^= INT32_MAX;
  return bit_cast<float>(order);
}

SPECDEC_INLINE int64_t id_of(int64_t key) { return UINT32_MAX - static_cast<uint32_t>(key); }

// Keeps the k largest keys, in descending order.
SPECDEC_INLINE void offer(int64_t key, int64_t* keys, int64_t k) {
  if (key <= keys[k - 1]) return;
  int64_t at = k - 1;
  for (; at > 0 && keys[at - 1] < key; --at) keys[at] = keys[at - 1];
  keys[at] = key;
}

// Offers logits whose ids ascend from `first_id`. One equal to the last key loses, as long as its id is higher.
inline void offer_all(const float* logits, int64_t count, int64_t first_id, int64_t* keys, int64_t k) {
  using Vec = FloatVec;
  for (int64_t i = 0; i < count; i += Vec::kLanes) {
    const int lanes = static_cast<int>(smaller<int64_t>(Vec::kLanes, count - i));
    const float last = value_of(keys[k - 1]);  // NaN while the list is not full: nothing may be passed over then
    const bool loses_ties = first_id + i > id_of(keys[k - 1]);
    if (last == last && loses_ties && !Vec::any_greater(Vec::load_some(logits + i, lanes), Vec::all(last))) continue;
    for (int lane = 0; lane < lanes; ++lane) offer(key_of(logits[i + lane], first_id + i + lane), keys, k);
  }
}

}  // namespace
}  // namespace medusa
}  // namespace specdec
