// Drives the torch-free core of tree attention, meant to be built with AddressSanitizer and UBSan, once for each
// instruction set: random trees, dense and paged caches, all element types, on one and on several threads. Every buffer
// ends where the next page must not be touched, since sanitizers do not see masked loads. Results must match sums in
// double, and not depend on the number of threads.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/tree_attention_kernel.h"
#include "cpu/tree_attention_schedule.h"
#include "guarded.h"

namespace {

using namespace specdec;
using namespace specdec::attention;

std::mt19937 rng(11);

int32_t below(int32_t bound) { return static_cast<int32_t>(rng() % static_cast<uint32_t>(bound)); }
double uniform() { return std::uniform_real_distribution<double>(-1.0, 1.0)(rng); }

double store(Element element, char* at, double value) {
  if (element == Element::kInt8) return *reinterpret_cast<int8_t*>(at) = static_cast<int8_t>(std::lrint(value * 9));
  if (element == Element::kFloat8)
    return to_float(*reinterpret_cast<Float8*>(at) = {static_cast<uint8_t>(below(0x70))});
  return store_floating(element, at, value);
}

double fetch(Element element, const char* at) {
  if (element == Element::kDouble) return *reinterpret_cast<const double*>(at);
  if (element == Element::kFloat) return *reinterpret_cast<const float*>(at);
  if (element == Element::kHalf) return to_float(*reinterpret_cast<const Half*>(at));
  return to_float(*reinterpret_cast<const BFloat16*>(at));
}

// One random problem: a batch of two, pages or not. Pages are as many as needed, in random order.
struct Trial {
  Element q_element, cache_element;
  int32_t num_nodes = 1 + below(below(5) ? 12 : 90), group = 1 + below(9), heads = 1 + below(3);
  int32_t qk_dim = 1 + below(below(2) ? 40 : 130), v_dim = 1 + below(below(2) ? 40 : 130);
  int32_t page_size = below(2) ? 1 + below(70) : 0, capacity = 0;
  std::vector<int64_t> prefix, mask;
  std::vector<std::vector<double>> k, v;  // by row of the cache: (row, head, dim)
  std::vector<double> q;
  std::vector<int32_t> table;
  std::vector<double> scales;
  Problem problem{};

  int32_t words() const { return (num_nodes + 63) / 64; }
  int32_t pages_per_row() const { return (capacity + page_size - 1) / page_size; }

  void draw() {
    for (int b = 0; b < 2; ++b) prefix.push_back(below(4) ? below(150) : below(1100));
    capacity = static_cast<int32_t>(std::max(prefix[0], prefix[1])) + num_nodes;
    mask.assign(2 * num_nodes * words(), 0);
    for (int b = 0; b < 2; ++b) {
      int64_t* rows = mask.data() + b * num_nodes * words();
      for (int32_t i = 0; i < num_nodes; ++i) {
        if (i > 0 && below(8) == 0) continue;  // padding
        int32_t parent = i == 0 ? -1 : below(3) ? i - 1 : below(i);
        while (parent > 0 && rows[parent * words()] == 0) parent = 0;
        for (int32_t w = 0; w < words() && parent >= 0; ++w) rows[i * words() + w] = rows[parent * words() + w];
        rows[i * words() + i / 64] |= int64_t{1} << i % 64;
      }
    }
    for (int32_t h = 0; h < heads; ++h) scales.push_back(0.1 + 0.1 * below(5));
    if (page_size) {
      for (int32_t i = 0; i < 2 * pages_per_row(); ++i) table.push_back(i);
      std::shuffle(table.begin(), table.end(), rng);
    }
  }

  int64_t outer_size() const { return page_size ? 2 * pages_per_row() : 2; }
  int64_t inner_size() const { return page_size ? page_size : capacity; }
  int64_t row_of(int32_t b, int64_t position) const {
    if (!page_size) return b * capacity + position;
    return int64_t{table[b * pages_per_row() + position / page_size]} * page_size + position % page_size;
  }

  CacheView fill_cache(const Guarded& memory, int32_t dim, std::vector<std::vector<double>>* values) {
    const int64_t bytes = bytes_of(cache_element);
    const CacheView view{memory.data(), inner_size() * heads * dim * bytes, heads * dim * bytes, dim * bytes};
    values->resize(outer_size() * inner_size());
    char* at = memory.data();
    for (std::vector<double>& row : *values) {
      for (int32_t i = 0; i < heads * dim; ++i, at += bytes) row.push_back(store(cache_element, at, uniform()));
    }
    return view;
  }

  // exp(score - log-sum-exp) . values in double, for one query row; returns the log-sum-exp.
  double attend(int32_t b, int32_t node, int32_t head, std::vector<double>* out) const {
    std::vector<int64_t> keys;
    for (int64_t i = 0; i < prefix[b]; ++i) keys.push_back(row_of(b, i));
    for (int32_t j = 0; j < num_nodes; ++j) {
      if (mask[(b * num_nodes + node) * words() + j / 64] >> j % 64 & 1) keys.push_back(row_of(b, prefix[b] + j));
    }
    if (problem.window && static_cast<int64_t>(keys.size()) > problem.window) {
      keys.erase(keys.begin(), keys.end() - problem.window);
    }
    const int32_t kv = head / group;
    std::vector<double> scores;
    double top = -INFINITY, sum = 0;
    for (const int64_t key : keys) {
      double score = 0;
      for (int32_t d = 0; d < qk_dim; ++d) {
        score += q[((b * num_nodes + node) * int64_t{heads * group} + head) * qk_dim + d] * k[key][kv * qk_dim + d];
      }
      score *= problem.scale * (problem.k_scale ? problem.k_scale[kv] : 1);
      if (problem.softcap > 0) score = problem.softcap * std::tanh(score / problem.softcap);
      scores.push_back(score);
      top = std::max(top, score);
    }
    out->assign(v_dim, 0.0);
    for (size_t i = 0; i < keys.size(); ++i) {
      const double weight = std::exp(scores[i] - top);
      sum += weight;
      for (int32_t d = 0; d < v_dim; ++d) (*out)[d] += weight * v[keys[i]][kv * v_dim + d];
    }
    for (double& x : *out) x *= (problem.v_scale ? problem.v_scale[kv] : 1) / sum;
    return top + std::log(sum);
  }
};

void run(const Trial& trial, const Kernel& kernel, int num_threads) {
  std::vector<std::unique_ptr<Planner>> plans;
  for (int b = 0; b < 2; ++b) {
    const MaskView view{trial.mask.data() + b * trial.num_nodes * trial.words(), trial.words(), 1, trial.num_nodes};
    plans.push_back(std::make_unique<Planner>(view, trial.prefix[b]));
  }
  Schedule schedule(trial.problem, kernel, plans, num_threads);
  std::vector<std::thread> threads;
  for (int i = 0; i < num_threads; ++i) {
    threads.emplace_back([&] {
      Workspace workspace;
      schedule.work(&workspace);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void check(const Trial& trial, const char* out, const void* lse) {
  const Problem& p = trial.problem;
  const bool is_half = p.q_element == Element::kHalf || p.q_element == Element::kBFloat16;
  const double tolerance = p.q_element == Element::kDouble ? 1e-9 : is_half ? 2e-2 : 2e-5;
  std::vector<double> expected;
  for (int32_t row = 0; row < 2 * trial.num_nodes * p.num_q_heads; ++row) {
    const int32_t head = row % p.num_q_heads, node = row / p.num_q_heads % trial.num_nodes;
    const int32_t b = row / p.num_q_heads / trial.num_nodes;
    int64_t bits = 0;
    for (int32_t w = 0; w < trial.words(); ++w) bits |= trial.mask[(b * trial.num_nodes + node) * trial.words() + w];
    if (bits == 0) continue;  // written by the caller
    const double want = trial.attend(b, node, head, &expected);
    const double have = p.q_element == Element::kDouble ? static_cast<const double*>(lse)[row]
                                                        : double{static_cast<const float*>(lse)[row]};
    require(std::abs(have - want) <= tolerance * (1 + std::abs(want)), "log-sum-exp");
    double largest = 0;
    for (const double x : expected) largest = std::max(largest, std::abs(x));
    for (int32_t d = 0; d < trial.v_dim; ++d) {
      const double x = fetch(p.q_element, out + (int64_t{row} * trial.v_dim + d) * bytes_of(p.q_element));
      require(std::abs(x - expected[d]) <= tolerance * (1 + largest), "output");
    }
  }
}

void try_one(Element q_element, Element cache_element, const Kernel& kernel) {
  Trial trial;
  trial.q_element = q_element;
  trial.cache_element = cache_element;
  trial.draw();
  Problem& p = trial.problem;
  const int32_t q_heads = trial.heads * trial.group;
  const int64_t rows = int64_t{2} * trial.num_nodes * q_heads, bytes = bytes_of(q_element);
  const int64_t cache_rows = trial.outer_size() * trial.inner_size() * trial.heads * bytes_of(cache_element);
  const Guarded q(rows * trial.qk_dim * bytes), k(cache_rows * trial.qk_dim), v(cache_rows * trial.v_dim);
  const Guarded out(rows * trial.v_dim * bytes), lse(rows * (q_element == Element::kDouble ? 8 : 4));
  for (int64_t i = 0; i < rows * trial.qk_dim; ++i) {
    trial.q.push_back(store(q_element, q.data() + i * bytes, uniform()));
  }
  p.k = trial.fill_cache(k, trial.qk_dim, &trial.k);
  p.v = trial.fill_cache(v, trial.v_dim, &trial.v);
  p.q = q.data();
  const int64_t node_bytes = int64_t{q_heads} * trial.qk_dim * bytes;
  p.q_strides[0] = trial.num_nodes * node_bytes, p.q_strides[1] = node_bytes, p.q_strides[2] = trial.qk_dim * bytes;
  p.out = out.data(), p.lse = lse.data();
  p.q_element = q_element, p.cache_element = cache_element;
  p.num_nodes = trial.num_nodes, p.num_q_heads = q_heads, p.group_size = trial.group;
  p.qk_dim = trial.qk_dim, p.v_dim = trial.v_dim;
  p.scale = 1 / std::sqrt(trial.qk_dim);
  p.softcap = below(3) ? 0 : 0.7;
  p.window = below(3) ? 0 : 1 + below(100);
  p.k_scale = p.v_scale = cache_element == q_element ? nullptr : trial.scales.data();
  if (cache_element != q_element) p.scale *= 0.01;  // int8 and float8 values are not small
  p.block_table = trial.page_size ? trial.table.data() : nullptr;
  p.table_strides[0] = trial.page_size ? trial.pages_per_row() : 0, p.table_strides[1] = 1;
  p.page_size = trial.page_size;

  run(trial, kernel, 1);
  if (cache_element != Element::kFloat8) check(trial, out.data(), lse.data());
  const std::vector<char> first(out.data(), out.data() + rows * trial.v_dim * bytes);
  for (const int threads : {2, 5}) {
    run(trial, kernel, threads);
    require(std::equal(first.begin(), first.end(), out.data()), "threads change the result");
  }
}

}  // namespace

int main() {
  const Kernel& kernel = *kernel_of<FmaArithmetic<FloatVec>>();
  const Kernel& in_double = *kernel_of<FmaArithmetic<ArrayVec<double, 4>>>();
  for (int i = 0; i < 2; ++i) {
    for (const Element q : {Element::kFloat, Element::kBFloat16, Element::kHalf, Element::kDouble}) {
      for (const Element cache : {q, Element::kInt8, Element::kFloat8}) {
        try_one(q, cache, q == Element::kDouble ? in_double : kernel);
#if defined(__AVX512BF16__)
        if (q == Element::kBFloat16) try_one(q, cache, *kernel_of<PairArithmetic>());
#endif
      }
    }
  }
  std::printf("ok\n");
}
