// The move itself, for the CPU and the GPU alike: no torch, no CUDA, raw pointers.
//
// A cache is rows of bytes. Row (sequence, position, head) starts at
//   dense: data + sequence * outer_stride + position * inner_stride + head * head_stride
//   paged: data + page * outer_stride + slot * inner_stride + head * head_stride,
//          page = block_table[sequence, position / page_size], slot = position % page_size.
// Entry i of an accepted path moves the row of position prefix + accepted[i] to position prefix + 1 + i. Paths
// increase, so accepted[i] >= i + 1: targets never pass sources. Whoever owns a byte column of all rows (a *lane*) can
// therefore move it down the path in order, in place, without temporaries and without waiting for anybody.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define SPECDEC_HOST_DEVICE __host__ __device__ __forceinline__
#define SPECDEC_UNROLL _Pragma("unroll")
#else
#define SPECDEC_HOST_DEVICE inline
#define SPECDEC_UNROLL
#endif

namespace specdec {

// Strides in bytes.
struct Layout {
  int64_t outer_stride;
  int64_t inner_stride;
  int64_t head_stride;
  uint32_t outer_size;  // sequences, or pages
  uint32_t inner_size;  // capacity, or page size
  uint32_t heads;
  uint32_t row_bytes;
};

struct Cache {
  char* data;
  Layout layout;
};

// A matrix of int32, strides in elements.
struct IndexMatrix {
  const int32_t* data;
  int64_t row_stride;
  int64_t column_stride;

  SPECDEC_HOST_DEVICE int32_t at(int64_t row, int64_t column) const {
    return data[row * row_stride + column * column_stride];
  }
};

// Where the next lengths go, one for each sequence; data is null when nobody asked. Stride in elements.
struct NewLengths {
  int32_t* data;
  int64_t stride;
};

struct Paths {
  IndexMatrix accepted;      // (batch, max_accepted)
  IndexMatrix num_accepted;  // (batch, 1)
  IndexMatrix prefix_len;    // (batch, 1)
  IndexMatrix block_table;   // (batch, max_pages), paged caches only
  NewLengths new_len;
  uint32_t batch;
  int32_t max_accepted;
  uint32_t max_pages;
};

// Byte offset of a position's row within the cache, or -1 when the position lies outside it.
template <bool kPaged>
SPECDEC_HOST_DEVICE int64_t row_offset(const Layout& layout, const Paths& paths, uint32_t sequence, uint32_t position) {
  if constexpr (kPaged) {
    const uint32_t column = position / layout.inner_size;
    if (column >= paths.max_pages) return -1;
    // A negative page wraps to a number no cache has.
    const uint32_t page = static_cast<uint32_t>(paths.block_table.at(sequence, column));
    if (page >= layout.outer_size) return -1;
    return page * layout.outer_stride + static_cast<int64_t>(position % layout.inner_size) * layout.inner_stride;
  } else {
    if (position >= layout.inner_size) return -1;
    return sequence * layout.outer_stride + position * layout.inner_stride;
  }
}

// The root and the accepted nodes join the prefix. A count below 0 adds nothing, and as elsewhere a count above
// max_accepted is max_accepted; a negative prefix stays what it is.
SPECDEC_HOST_DEVICE void write_new_length(const Paths& paths, uint32_t sequence) {
  int32_t count = paths.num_accepted.at(sequence, 0);
  if (count > paths.max_accepted) count = paths.max_accepted;
  const int32_t prefix = paths.prefix_len.at(sequence, 0);
  const bool grows = prefix >= 0 && count >= 0;
  // Added without a sign: a prefix near the end of the range wraps and does not trap.
  const uint32_t length = static_cast<uint32_t>(prefix) + (grows ? static_cast<uint32_t>(count) + 1u : 0u);
  paths.new_len.data[sequence * paths.new_len.stride] = static_cast<int32_t>(length);
}

// Moves one lane along the path of one sequence. `copy(lane, source, target)` is given kInFlight offsets at a time and
// must read all sources before it writes a target, or go in order; a source of -1 means that nothing is to be moved.
// The nodes are read before it is known how many of them count, so that a GPU waits once for both.
template <bool kPaged, int kInFlight, class Copy>
SPECDEC_HOST_DEVICE void move_lane(char* lane, const Layout& layout, const Paths& paths, uint32_t sequence,
                                   const Copy& copy) {
  const int32_t count = paths.num_accepted.at(sequence, 0);
  const int32_t prefix = paths.prefix_len.at(sequence, 0);
  for (int32_t first = 0; first < paths.max_accepted; first += kInFlight) {
    int32_t node[kInFlight];
    SPECDEC_UNROLL
    for (int32_t j = 0; j < kInFlight; ++j) {
      node[j] = first + j < paths.max_accepted ? paths.accepted.at(sequence, first + j) : 0;
    }
    if (prefix < 0 || first >= count) return;
    int64_t source[kInFlight], target[kInFlight];
    SPECDEC_UNROLL
    for (int32_t j = 0; j < kInFlight; ++j) {
      const int32_t step = first + j + 1;
      source[j] = target[j] = -1;
      if (step <= count && node[j] > step) {
        const uint32_t start = static_cast<uint32_t>(prefix);
        target[j] = row_offset<kPaged>(layout, paths, sequence, start + static_cast<uint32_t>(step));
        if (target[j] >= 0) {
          source[j] = row_offset<kPaged>(layout, paths, sequence, start + static_cast<uint32_t>(node[j]));
        }
      }
    }
    copy(lane, source, target);
  }
}

}  // namespace specdec
