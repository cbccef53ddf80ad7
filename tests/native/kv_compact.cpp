// Drives the torch-free core of the compaction kernels, meant to be built with AddressSanitizer and UBSan:
// the CPU loop on one and on several threads, and the CUDA thread body over its grid in shuffled orders. Each must
// leave exactly the bytes of a gather from a copy, in the whole buffer, guards and gaps included.
#include "cpu/kv_compact.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/kv_compact.cuh"

namespace {

using namespace specdec;

std::mt19937 rng(7);

int32_t random_below(int64_t bound) { return static_cast<int32_t>(rng() % static_cast<uint64_t>(bound)); }

int32_t pick(std::initializer_list<int32_t> values) { return values.begin()[random_below(values.size())]; }

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

// One buffer and where the cache lies in it. `first` is an offset, since every run gets a buffer of its own.
struct Buffer {
  std::vector<char> bytes;
  int64_t first;
  Layout layout;
};

struct Step {
  bool paged;
  uint32_t batch;
  uint32_t capacity;  // positions of one sequence
  int32_t max_accepted;
  std::vector<int32_t> accepted, num_accepted, prefix_len, block_table;
  bool asks_lengths;
  std::vector<Buffer> buffers;
};

std::vector<int32_t> random_path(int32_t num_nodes) {
  std::vector<int32_t> parents{-1}, path;
  for (int32_t i = 1; i < num_nodes; ++i) parents.push_back(random_below(i));
  for (int32_t node = random_below(num_nodes); node > 0; node = parents[node]) path.insert(path.begin(), node);
  return path;
}

// Paths of random trees; now and then a row that a kernel must skip in part or altogether.
void make_paths(Step& step) {
  const int32_t num_nodes = 1 + random_below(step.capacity);
  step.max_accepted = 1 + random_below(num_nodes);
  for (uint32_t row = 0; row < step.batch; ++row) {
    std::vector<int32_t> path = random_path(num_nodes);
    step.num_accepted.push_back(std::min<int32_t>(static_cast<int32_t>(path.size()), step.max_accepted));
    step.prefix_len.push_back(random_below(step.capacity - num_nodes + 1));
    path.resize(step.max_accepted, -1);
    const int32_t fault = random_below(12);
    if (fault == 0) step.num_accepted.back() = step.max_accepted + 3;
    if (fault == 1) step.prefix_len.back() = -1 - random_below(5);
    if (fault == 2) step.prefix_len.back() = INT32_MAX - random_below(2);
    if (fault == 3) step.prefix_len.back() = static_cast<int32_t>(step.capacity) - 2;
    if (fault == 4) std::reverse(path.begin(), path.end());
    if (fault == 5) step.num_accepted.back() = -1 - random_below(2);
    step.accepted.insert(step.accepted.end(), path.begin(), path.end());
  }
}

Buffer make_buffer(uint32_t outer, uint32_t inner) {
  const int64_t item = pick({1, 2, 4, 8});
  const int64_t row_bytes = item * (1 + random_below(40));
  const uint32_t heads = static_cast<uint32_t>(1 + random_below(3));
  const int64_t row_step = row_bytes + item * pick({0, 0, 1, 3});
  Layout layout{0, 0, 0, outer, inner, heads, static_cast<uint32_t>(row_bytes)};
  // The order of the dimensions in memory, innermost first.
  std::vector<std::pair<int64_t*, uint32_t>> dims{
      {&layout.head_stride, heads}, {&layout.inner_stride, inner}, {&layout.outer_stride, outer}};
  std::shuffle(dims.begin(), dims.end(), rng);
  int64_t size = row_step;
  for (auto& [stride, count] : dims) {
    *stride = size;
    size *= count;
  }
  Buffer buffer{{}, item * pick({0, 1, 2, 5, 16}), layout};
  // The tail ends with the last row, so that AddressSanitizer sees the first byte behind it.
  buffer.bytes.resize(static_cast<size_t>(buffer.first + size - row_step + row_bytes));
  for (char& byte : buffer.bytes) byte = static_cast<char>(rng());
  return buffer;
}

Step make_step() {
  Step step{};
  step.paged = random_below(2) == 1;
  step.batch = static_cast<uint32_t>(1 + random_below(4));
  const uint32_t page_size = static_cast<uint32_t>(pick({1, 2, 3, 16, 33}));
  const uint32_t max_pages = static_cast<uint32_t>(1 + random_below(5)) * (page_size < 4 ? 8 : 1);
  step.capacity = step.paged ? page_size * max_pages : static_cast<uint32_t>(2 + random_below(70));
  make_paths(step);
  uint32_t outer = step.batch, inner = step.capacity;
  if (step.paged) {
    outer = step.batch * max_pages + 2;
    inner = page_size;
    for (uint32_t page = 0; page < outer; ++page) step.block_table.push_back(static_cast<int32_t>(page));
    std::shuffle(step.block_table.begin(), step.block_table.end(), rng);
    step.block_table.resize(step.batch * max_pages);
    if (random_below(4) == 0) {
      step.block_table[random_below(step.block_table.size())] = pick({-1, static_cast<int32_t>(outer), INT32_MIN});
    }
  }
  step.asks_lengths = random_below(2) == 1;
  for (int32_t i = random_below(7); i > 0; --i) step.buffers.push_back(make_buffer(outer, inner));
  return step;
}

Paths paths_of(const Step& step) {
  const int64_t max_pages = step.batch ? static_cast<int64_t>(step.block_table.size()) / step.batch : 0;
  return {{step.accepted.data(), step.max_accepted, 1},
          {step.num_accepted.data(), 1, 0},
          {step.prefix_len.data(), 1, 0},
          {step.block_table.data(), max_pages, 1},
          {nullptr, 1},
          step.batch,
          step.max_accepted,
          static_cast<uint32_t>(max_pages)};
}

// Offset of a row, or -1: written again, in the plainest way, so that the kernels' own arithmetic is under test.
int64_t expected_offset(const Step& step, const Layout& layout, uint32_t row, int64_t position) {
  if (position < 0 || position >= step.capacity) return -1;
  if (!step.paged) return row * layout.outer_stride + position * layout.inner_stride;
  const int64_t max_pages = static_cast<int64_t>(step.block_table.size()) / step.batch;
  const int64_t page = step.block_table[row * max_pages + position / layout.inner_size];
  if (page < 0 || page >= layout.outer_size) return -1;
  return page * layout.outer_stride + position % layout.inner_size * layout.inner_stride;
}

std::vector<char> gather(const Step& step, const Buffer& buffer) {
  std::vector<char> after = buffer.bytes;
  for (uint32_t row = 0; row < step.batch; ++row) {
    const int64_t prefix = step.prefix_len[row];
    for (int32_t i = 0; i < std::min(step.num_accepted[row], step.max_accepted) && prefix >= 0; ++i) {
      const int32_t node = step.accepted[row * step.max_accepted + i];
      const int64_t source = expected_offset(step, buffer.layout, row, prefix + node);
      const int64_t target = expected_offset(step, buffer.layout, row, prefix + 1 + i);
      if (node <= i + 1 || source < 0 || target < 0) continue;
      for (uint32_t head = 0; head < buffer.layout.heads; ++head) {
        const int64_t start = buffer.first + head * buffer.layout.head_stride;
        std::copy_n(&buffer.bytes[start + source], buffer.layout.row_bytes, &after[start + target]);
      }
    }
  }
  return after;
}

void run_on_one_thread(const std::vector<Cache>& caches, const Paths& paths, bool paged) {
  const auto serial = [](int64_t end, int64_t, const auto& body) { body(0, end); };
  paged ? compact_caches<true>(caches.data(), static_cast<int64_t>(caches.size()), paths, serial)
        : compact_caches<false>(caches.data(), static_cast<int64_t>(caches.size()), paths, serial);
}

void run_on_threads(const std::vector<Cache>& caches, const Paths& paths, bool paged) {
  const auto one_each = [](int64_t end, int64_t, const auto& body) {
    std::vector<std::thread> threads;
    for (int64_t item = 0; item < end; ++item) threads.emplace_back([&body, item] { body(item, item + 1); });
    for (std::thread& thread : threads) thread.join();
  };
  paged ? compact_caches<true>(caches.data(), static_cast<int64_t>(caches.size()), paths, one_each)
        : compact_caches<false>(caches.data(), static_cast<int64_t>(caches.size()), paths, one_each);
}

// Runs every thread of the grid, in random order. `max_z` shrinks the grid as a batch beyond 65535 would.
void run_on_grid(const std::vector<Cache>& caches, const Paths& paths, bool paged, uint32_t max_z) {
  plan_launches(caches.data(), static_cast<int64_t>(caches.size()), paths, [&](const Launch& launch, Grid grid) {
    grid.z = std::min(grid.z, max_z);
    const uint32_t lanes = grid.x * grid.threads;
    std::vector<uint32_t> order(static_cast<size_t>(lanes) * grid.y * grid.z);
    for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), rng);
    for (const uint32_t i : order) {
      const uint32_t lane = i % lanes, cache = i / lanes % grid.y, sequence = i / lanes / grid.y;
      write_lengths_thread(launch, lane, cache, sequence, grid.z);
      paged ? compact_thread<true>(launch, lane, cache, sequence, grid.z)
            : compact_thread<false>(launch, lane, cache, sequence, grid.z);
    }
  });
}

using Runner = std::function<void(const std::vector<Cache>&, const Paths&, bool)>;

void check(const Step& step, const std::string& name, const Runner& run) {
  std::vector<Buffer> buffers = step.buffers;
  std::vector<Cache> caches;
  for (Buffer& buffer : buffers) caches.push_back({buffer.bytes.data() + buffer.first, buffer.layout});
  Paths paths = paths_of(step);
  // Every other place is a guard.
  std::vector<int32_t> lengths(2 * step.batch, -77), expected = lengths;
  for (uint32_t row = 0; row < step.batch && step.asks_lengths; ++row) {
    const int64_t prefix = step.prefix_len[row], count = std::min(step.num_accepted[row], step.max_accepted);
    expected[2 * row] = static_cast<int32_t>(prefix < 0 || count < 0 ? prefix : prefix + 1 + count);
  }
  if (step.asks_lengths) paths.new_len = {lengths.data(), 2};
  run(caches, paths, step.paged);
  require(lengths == expected, name + " writes other lengths");
  for (size_t i = 0; i < buffers.size(); ++i) {
    require(buffers[i].bytes == gather(step, step.buffers[i]), name + " differs from the gather");
  }
}

void check_random_steps(int count) {
  for (int trial = 0; trial < count; ++trial) {
    const Step step = make_step();
    check(step, "the CPU loop", run_on_one_thread);
    if (trial % 16 == 0) check(step, "the CPU loop on threads", run_on_threads);
    for (const uint32_t max_z : {kMaxGridY, 1u, 2u}) {
      check(step, "the CUDA grid",
            [max_z](const auto& caches, const Paths& paths, bool paged) { run_on_grid(caches, paths, paged, max_z); });
    }
  }
}

// More caches, and more layouts, than one launch takes.
void check_launch_limits() {
  Step step{};
  step.batch = 2;
  step.capacity = 9;
  step.max_accepted = 2;
  step.accepted = {3, 5, 2, 4};
  step.num_accepted = {2, 2};
  step.prefix_len = {1, 3};
  for (int i = 0; i < 2 * kMaxCaches + 5; ++i) {
    Buffer buffer{std::vector<char>(2 * 9 * 24), 0, {9 * 24, 24, 0, 2, 9, 1, 24}};
    if (i > 2 * kMaxCaches - 20) buffer.layout.row_bytes = static_cast<uint32_t>(24 - i % 11);
    for (char& byte : buffer.bytes) byte = static_cast<char>(rng());
    step.buffers.push_back(buffer);
  }
  check(step, "several launches",
        [](const auto& caches, const Paths& paths, bool paged) { run_on_grid(caches, paths, paged, kMaxGridY); });
  int launches = 0;
  const std::vector<Cache> few(64, Cache{step.buffers[0].bytes.data(), step.buffers[0].layout});
  plan_launches(few.data(), 64, paths_of(step), [&](const Launch&, Grid grid) {
    ++launches;
    require(grid.y == 64 && grid.z == 2 && grid.x == 1 && grid.threads == 32, "the grid of 64 caches");
  });
  require(launches == 1, "all layers in one launch");
  Paths paths = paths_of(step);
  paths.max_accepted = 0;
  plan_launches(few.data(), 64, paths, [&](const Launch&, Grid) { ++launches; });
  require(launches == 1, "no launch where nothing can move");
  int32_t lengths[2];
  paths.new_len = {lengths, 1};
  plan_launches(few.data(), 64, paths, [&](const Launch&, Grid grid) {
    ++launches;
    require(grid.x == 1 && grid.y == 1 && grid.z == 2 && grid.threads == 32, "the grid of lengths alone");
  });
  require(launches == 2, "one launch for lengths alone");
}

// Nothing accepted, or all in place: not a byte of a cache is looked at, however many there are.
void check_idle_rows() {
  const std::vector<Cache> caches(64, Cache{nullptr, {1 << 20, 1 << 10, 0, 3, 1 << 10, 1, 1 << 10}});
  const std::vector<int32_t> accepted{1, 2, 3, -1, -1, -1, 1, 2, 9}, counts{3, 0, 2}, prefix_len{5, 0, 7};
  Paths paths{};
  paths.accepted = {accepted.data(), 3, 1};
  paths.num_accepted = {counts.data(), 1, 0};
  paths.prefix_len = {prefix_len.data(), 1, 0};
  paths.batch = 3;
  paths.max_accepted = 3;
  bool called = false;
  compact_caches<false>(caches.data(), 64, paths, [&](int64_t, int64_t, const auto&) { called = true; });
  require(!called, "idle rows cost nothing");
  run_on_grid(caches, paths, false, kMaxGridY);  // a null pointer would show
}

void check_lanes() {
  alignas(16) static char storage[64];
  Cache cache{storage, {4096, 128, 64, 1, 1, 2, 64}};
  require(lane_bytes_of(cache) == 16, "aligned rows move in lanes of 16 bytes");
  cache.data = storage + 8;
  require(lane_bytes_of(cache) == 8, "an address off by 8");
  cache = {storage, {4096, 132, 64, 1, 1, 2, 64}};
  require(lane_bytes_of(cache) == 4, "a stride of 132 bytes");
  cache = {storage, {4096, 128, 64, 1, 1, 2, 34}};
  require(lane_bytes_of(cache) == 2, "rows of 34 bytes");
  cache.data = storage + 3;
  require(lane_bytes_of(cache) == 1, "an odd address");
}

}  // namespace

int main() {
  check_lanes();
  check_idle_rows();
  check_launch_limits();
  check_random_steps(400);
  std::printf("kv_compact: the CPU loop and the CUDA grid match the gather\n");
}
