// Compaction on the CPU, torch-free: the tests drive it under sanitizers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/kv_move.h"

namespace specdec {

// Copies whole rows: on the CPU a lane is as wide as the row, since one thread owns all of it.
struct RowCopy {
  size_t bytes;

  void operator()(char* lane, const int64_t (&source)[1], const int64_t (&target)[1]) const {
    if (source[0] >= 0) std::memcpy(lane + target[0], lane + source[0], bytes);
  }
};

// Rows that are out of place, over all sequences. Entries outside the cache count too: it is an estimate of work.
inline int64_t count_moves(const Paths& paths) {
  int64_t moves = 0;
  for (uint32_t sequence = 0; sequence < paths.batch; ++sequence) {
    const int32_t count = std::min(paths.num_accepted.at(sequence, 0), paths.max_accepted);
    for (int32_t i = 0; i < count; ++i) moves += paths.accepted.at(sequence, i) > i + 1;
  }
  return moves;
}

// Moves the rows of all caches. `parallel_for(end, grain, body)` calls body(begin, end) on parts of [0, end) of at
// least `grain` items, on this thread when one part is enough.
template <bool kPaged, class ParallelFor>
void compact_caches(const Cache* caches, int64_t num_caches, const Paths& paths, const ParallelFor& parallel_for) {
  // Below this many bytes a thread costs more to wake than it saves.
  constexpr int64_t kBytesPerThread = 256 << 10;
  for (uint32_t sequence = 0; paths.new_len.data && sequence < paths.batch; ++sequence) {
    write_new_length(paths, sequence);
  }
  const int64_t moves = count_moves(paths);
  if (moves == 0) return;
  int64_t bytes_per_move = 0;
  for (int64_t i = 0; i < num_caches; ++i) {
    bytes_per_move += static_cast<int64_t>(caches[i].layout.row_bytes) * caches[i].layout.heads;
  }
  const int64_t items = num_caches * paths.batch;
  const int64_t threads_worth = std::max<int64_t>(1, moves * bytes_per_move / kBytesPerThread);
  parallel_for(items, (items + threads_worth - 1) / threads_worth, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const Cache& cache = caches[item / paths.batch];
      const uint32_t sequence = static_cast<uint32_t>(item % paths.batch);
      for (uint32_t head = 0; head < cache.layout.heads; ++head) {
        move_lane<kPaged, 1>(cache.data + head * cache.layout.head_stride, cache.layout, paths, sequence,
                             RowCopy{cache.layout.row_bytes});
      }
    }
  });
}

}  // namespace specdec
