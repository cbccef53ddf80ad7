// Compaction on the GPU: the launch plan and the kernel, torch-free. The thread body also compiles for the host, where
// a test drives it over the same grid in shuffled orders.
#pragma once

#include <cstdint>

#include "common/kv_move.h"

#ifndef __CUDACC__
#define __align__(n) alignas(n)
#endif

namespace specdec {

// A device copy of everything a launch needs would cost an allocation and a transfer; kernel parameters (4 KB) do not.
constexpr int kMaxParameterBytes = 4096;
constexpr int kMaxLayouts = 8;
constexpr int kMaxCaches = 392;
constexpr uint32_t kMaxThreads = 256;
constexpr uint32_t kMaxGridY = 65535;

// One layout, and the widest lane that divides its rows, its strides and its caches' addresses.
struct LaneLayout {
  Layout layout;
  uint32_t lane_bytes;
};

struct Launch {
  Paths paths;
  LaneLayout layouts[kMaxLayouts];
  char* data[kMaxCaches];
  uint8_t layout_of[kMaxCaches];
  bool writes_lengths;  // one launch of a call does
};
static_assert(sizeof(Launch) <= kMaxParameterBytes);

// x: lanes, y: caches, z: sequences.
struct Grid {
  uint32_t x, y, z;
  uint32_t threads;
};

struct __align__(16) Bytes16 {
  uint32_t words[4];
};
struct __align__(8) Bytes8 {
  uint32_t words[2];
};

// Reads all sources before it writes a target: kInFlight loads hide one latency.
template <class Lane, int kInFlight>
struct LaneCopy {
  SPECDEC_HOST_DEVICE void operator()(char* lane, const int64_t (&source)[kInFlight],
                                      const int64_t (&target)[kInFlight]) const {
    Lane held[kInFlight];
    SPECDEC_UNROLL
    for (int j = 0; j < kInFlight; ++j) {
      if (source[j] >= 0) held[j] = *reinterpret_cast<const Lane*>(lane + source[j]);
    }
    SPECDEC_UNROLL
    for (int j = 0; j < kInFlight; ++j) {
      if (source[j] >= 0) *reinterpret_cast<Lane*>(lane + target[j]) = held[j];
    }
  }
};

// What one thread of each sequence does beside its lane. Nobody reads what it writes.
SPECDEC_HOST_DEVICE void write_lengths_thread(const Launch& launch, uint32_t lane, uint32_t cache, uint32_t sequence,
                                              uint32_t sequence_step) {
  if (!launch.writes_lengths || lane != 0 || cache != 0) return;
  for (; sequence < launch.paths.batch; sequence += sequence_step) write_new_length(launch.paths, sequence);
}

// What one thread does: its lane of one cache, in every gridDim.z-th sequence.
template <bool kPaged>
SPECDEC_HOST_DEVICE void compact_thread(const Launch& launch, uint32_t lane, uint32_t cache, uint32_t sequence,
                                        uint32_t sequence_step) {
  constexpr int kInFlight = 4;
  const LaneLayout& view = launch.layouts[launch.layout_of[cache]];
  if (view.lane_bytes == 0) return;  // a launch without caches
  const uint32_t lanes_per_row = view.layout.row_bytes / view.lane_bytes;
  const uint32_t head = lane / lanes_per_row;
  if (head >= view.layout.heads) return;
  const uint32_t column = lane - head * lanes_per_row;
  char* const start =
      launch.data[cache] + head * view.layout.head_stride + static_cast<int64_t>(column) * view.lane_bytes;
  for (; sequence < launch.paths.batch; sequence += sequence_step) {
    switch (view.lane_bytes) {
      case 16:
        move_lane<kPaged, kInFlight>(start, view.layout, launch.paths, sequence, LaneCopy<Bytes16, kInFlight>{});
        break;
      case 8:
        move_lane<kPaged, kInFlight>(start, view.layout, launch.paths, sequence, LaneCopy<Bytes8, kInFlight>{});
        break;
      case 4:
        move_lane<kPaged, kInFlight>(start, view.layout, launch.paths, sequence, LaneCopy<uint32_t, kInFlight>{});
        break;
      case 2:
        move_lane<kPaged, kInFlight>(start, view.layout, launch.paths, sequence, LaneCopy<uint16_t, kInFlight>{});
        break;
      default:
        move_lane<kPaged, kInFlight>(start, view.layout, launch.paths, sequence, LaneCopy<uint8_t, kInFlight>{});
    }
  }
}

#ifdef __CUDACC__
template <bool kPaged>
__global__ void __launch_bounds__(kMaxThreads) kv_compact_kernel(const __grid_constant__ Launch launch) {
  const uint32_t lane = blockIdx.x * blockDim.x + threadIdx.x;
  write_lengths_thread(launch, lane, blockIdx.y, blockIdx.z, gridDim.z);
  compact_thread<kPaged>(launch, lane, blockIdx.y, blockIdx.z, gridDim.z);
}
#endif

// The widest of 16, 8, 4, 2 and 1 bytes that every row of the cache starts at a multiple of.
inline uint32_t lane_bytes_of(const Cache& cache) {
  const Layout& layout = cache.layout;
  const uint64_t bits = reinterpret_cast<uintptr_t>(cache.data) | static_cast<uint64_t>(layout.outer_stride) |
                        static_cast<uint64_t>(layout.inner_stride) | static_cast<uint64_t>(layout.head_stride) |
                        layout.row_bytes | 16;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

inline bool same_layout(const LaneLayout& a, const LaneLayout& b) {
  return a.lane_bytes == b.lane_bytes && a.layout.outer_stride == b.layout.outer_stride &&
         a.layout.inner_stride == b.layout.inner_stride && a.layout.head_stride == b.layout.head_stride &&
         a.layout.outer_size == b.layout.outer_size && a.layout.inner_size == b.layout.inner_size &&
         a.layout.heads == b.layout.heads && a.layout.row_bytes == b.layout.row_bytes;
}

// Collects caches into launches: one, unless there are more than kMaxCaches caches or kMaxLayouts kinds of them, or
// nothing to move and no lengths to write.
// `emit(launch, grid)` is called once for each. Grids depend on shapes only, never on the paths.
template <class Emit>
void plan_launches(const Cache* caches, int64_t num_caches, const Paths& paths, const Emit& emit) {
  if (paths.batch == 0) return;
  if (paths.max_accepted == 0) num_caches = 0;
  Launch launch{};
  launch.paths = paths;
  launch.writes_lengths = paths.new_len.data != nullptr;
  int num_layouts = 0, num_planned = 0;
  uint64_t max_lanes = 0;
  const auto flush = [&] {
    if (num_planned == 0 && !launch.writes_lengths) return;
    if (max_lanes == 0) max_lanes = 1;
    const uint64_t warps = (max_lanes + 31) / 32;
    const uint32_t threads = warps * 32 < kMaxThreads ? static_cast<uint32_t>(warps * 32) : kMaxThreads;
    const uint32_t blocks = static_cast<uint32_t>((max_lanes + threads - 1) / threads);
    const uint32_t caches_planned = num_planned > 0 ? static_cast<uint32_t>(num_planned) : 1;
    emit(launch, Grid{blocks, caches_planned, paths.batch < kMaxGridY ? paths.batch : kMaxGridY, threads});
    num_layouts = num_planned = 0;
    max_lanes = 0;
    launch.writes_lengths = false;
  };
  for (int64_t i = 0; i < num_caches; ++i) {
    const LaneLayout view{caches[i].layout, lane_bytes_of(caches[i])};
    int known = 0;
    while (known < num_layouts && !same_layout(launch.layouts[known], view)) ++known;
    if (known == kMaxLayouts || num_planned == kMaxCaches) {
      flush();
      known = 0;
    }
    if (known == num_layouts) launch.layouts[num_layouts++] = view;
    launch.data[num_planned] = caches[i].data;
    launch.layout_of[num_planned++] = static_cast<uint8_t>(known);
    const uint64_t lanes = static_cast<uint64_t>(view.layout.row_bytes / view.lane_bytes) * view.layout.heads;
    if (lanes > max_lanes) max_lanes = lanes;
  }
  flush();
}

}  // namespace specdec
