// Drives the torch-free core of verification, meant to be built with AddressSanitizer and UBSan, once for each
// instruction set: the sums over a block against long double, then every rule on random and on absurd arguments, on one
// and on several threads. Whatever the arguments, results stay in their ranges and do not depend on the threads.
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/verify_kernel.h"
#include "cpu/verify_philox.h"
#include "cpu/verify_walk.h"
#include "guarded.h"

namespace {

using namespace specdec;
using namespace specdec::verification;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Element kElements[] = {Element::kFloat, Element::kBFloat16, Element::kHalf, Element::kDouble};

std::mt19937_64 rng(5);

int64_t below(int64_t bound) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(bound)); }
double normal() { return std::normal_distribution<double>()(rng); }

void close(double actual, long double expected, double tolerance, const std::string& what) {
  const long double error = std::abs(actual - expected), smallest = 1e-290;
  require(error <= tolerance * std::abs(expected) + smallest, what + ": " + std::to_string(actual));
}

// Logits at the end of their memory, and what they are.
struct Block {
  Guarded memory;
  std::vector<double> values;

  Block(Element element, int64_t count, const std::function<double(int64_t)>& value)
      : memory(static_cast<size_t>(count * bytes_of(element))) {
    for (int64_t i = 0; i < count; ++i) {
      values.push_back(store_floating(element, memory.data() + i * bytes_of(element), value(i)));
    }
  }
};

void check_sums(Element element, const Block& block, double scale) {
  const RowKernel& kernel = *kernel_of(element);
  const void* const logits = block.memory.data();
  const int64_t count = static_cast<int64_t>(block.values.size());
  const double top = *std::max_element(block.values.begin(), block.values.end());
  std::vector<double> weights(count);
  long double total = 0, logs = 0;
  kernel.weights(logits, count, top, scale, weights.data());
  for (int64_t i = 0; i < count; ++i) {
    const long double t = (static_cast<long double>(block.values[i]) - top) * scale, weight = std::exp2(t);
    if (t < -1020) {
      require(weights[i] == 0, "weight of nothing: " + std::to_string(static_cast<double>(t)));
    } else {
      close(weights[i], weight, 3e-12, "weight");
    }
    total += weight;
    if (weight > 0) logs += weight * t;
  }
  require(kernel.largest(logits, count) == top, "largest");
  const Sums sums = kernel.sums(logits, count, top, scale), entropy = kernel.entropy_sums(logits, count, top, scale);
  close(sums.weight, total, 1e-11, "sum");
  close(entropy.weight, total, 1e-11, "sum beside the entropy");
  close(entropy.weight_log2, logs, 1e-9, "sum of logarithms");
  const RoughSum rough = kernel.rough_sum(logits, count, scale, 0);
  require(rough.largest == top, "largest of a rough sum");
  close(rough.weight, total, kRough / 2, "rough sum");
  close(kernel.sum(weights.data(), count), total, 1e-11, "sum of doubles");
  require(block.values[kernel.find(logits, count, top)] == top, "find");
  require(kernel.find(logits, count, kInf) == count, "find what is not there");
  std::vector<double> rest = weights;
  kernel.subtract(rest.data(), weights.data(), count, 0.75, 0.5);
  for (int64_t i = 0; i < count; ++i) close(rest[i], 0.25L * weights[i], 1e-15, "subtract");
}

void check_blocks(Element element) {
  for (int64_t count : {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 1000, 4095, 4096}) {
    for (double spread : {0.0, 2.0, 300.0}) {
      check_sums(element, Block(element, count, [&](int64_t) { return spread * normal(); }), 1.44 / (0.1 + below(3)));
    }
    const int64_t peak = below(count);
    const auto flat = [&](int64_t i) { return i == peak ? 0.0 : -7.3 - 0.01 * below(2); };
    check_sums(element, Block(element, count, flat), 1.0);
    check_sums(element, Block(element, count, [&](int64_t i) { return i == peak ? 3.0 : -kInf; }), 1e5);
  }
}

// A NaN or +inf anywhere shows in the largest; only -inf is not finite either.
void check_unreadable(Element element) {
  const RowKernel& kernel = *kernel_of(element);
  for (int64_t count : {1, 5, 16, 17, 64, 100, 1111}) {
    for (double odd : {static_cast<double>(NAN), kInf, -kInf}) {
      for (double others : {0.5, -kInf}) {
        const int64_t at = below(count);
        const Block block(element, count, [&](int64_t i) { return i == at ? odd : others; });
        const double exact = kernel.largest(block.memory.data(), count);
        const double rough = kernel.rough_sum(block.memory.data(), count, 1.44, 0).largest;
        const bool readable = odd == -kInf && others == 0.5 && count > 1;
        require(std::isfinite(exact) == readable && std::isfinite(rough) == readable, "unreadable block");
        if (odd == -kInf) require(rough == (readable ? 0.5 : -kInf), "block without a logit");
      }
    }
  }
}

void share_out(int64_t num_blocks, const void* body, void (*call)(const void*, int64_t, int64_t)) {
  const int64_t middle = num_blocks / 2;
  std::thread first(call, body, 0, middle);
  call(body, middle, num_blocks);
  first.join();
}

// Arguments of any rule; about half of them sensible, the others any bits at all.
struct Arguments {
  Problem problem{};
  std::vector<std::unique_ptr<Guarded>> memory;
  std::unique_ptr<DraftVocab> draft_vocab;

  template <class T>
  T* fill(int64_t count, const std::function<T()>& value) {
    memory.push_back(std::make_unique<Guarded>(static_cast<size_t>(count) * sizeof(T)));
    T* const data = reinterpret_cast<T*>(memory.back()->data());
    for (int64_t i = 0; i < count; ++i) data[i] = value();
    return data;
  }
  template <class T>
  T* integers(int64_t count, int64_t low, int64_t high, bool wild) {
    return fill<T>(count, [=] { return static_cast<T>(wild ? static_cast<int64_t>(rng()) : low + below(high - low)); });
  }
  Logits logits(int64_t num_rows, int64_t size, bool wild) {
    const Element element = kElements[below(4)];
    const int64_t bytes = bytes_of(element);
    memory.push_back(std::make_unique<Guarded>(static_cast<size_t>(num_rows * size * bytes)));
    char* const data = memory.back()->data();
    for (int64_t i = 0; i < num_rows * size; ++i) {
      const double odd[] = {NAN, kInf, -kInf, 65504.0};
      store_floating(element, data + i * bytes, below(wild ? 50 : 100000) == 0 ? odd[below(4)] : 3 * normal());
    }
    return {data, size * bytes, bytes, size, kernel_of(element)};
  }

  explicit Arguments(bool wild) {
    Problem& p = problem;
    p.batch = 1 + below(3);
    p.num_nodes = 1 + below(8);
    p.vocab = below(4) ? 1 + below(40) : 4000 + below(9000);
    const int64_t nodes = p.batch * p.num_nodes;
    const bool wild_integers = wild && below(2);
    p.first_id_node = below(2);
    p.ids = integers<int64_t>(nodes, -1, p.vocab + 1, wild_integers);
    p.ids_strides[0] = p.num_nodes;
    p.ids_strides[1] = 1;
    if (p.first_id_node == 0) {
      p.parents = integers<int32_t>(nodes, -2, p.num_nodes + 1, wild_integers);
      p.parents_strides[0] = p.num_nodes;
      p.parents_strides[1] = 1;
    }
    if (below(2)) {
      p.lengths = integers<int32_t>(p.batch, -1, p.num_nodes + 2, wild_integers);
      p.lengths_stride = 1;
      p.length_offset = p.first_id_node;
    }
    p.target = logits(nodes, p.vocab, wild);
    p.target_batch_stride = p.num_nodes * p.target.node_stride;
    if (below(3)) read_draft(wild_integers, wild);
    const bool wild_floats = wild && below(3) == 0;
    const auto share = [] { return std::uniform_real_distribution<float>(0, 1)(rng); };
    const auto any_bits = [] { return bit_cast<float>(static_cast<uint32_t>(rng())); };
    p.temperature = fill<float>(p.batch, [&] { return wild_floats ? any_bits() : below(4) ? share() : 0.0f; });
    p.temperature_stride = 1;
    p.uniforms = fill<float>(nodes, [&] { return wild_floats ? any_bits() : share(); });
    p.uniforms_strides[0] = p.num_nodes;
    p.uniforms_strides[1] = 1;
    p.with_replacement = below(2) == 1;
    p.epsilon = 0.09;
    p.delta = 0.3;
  }

  void read_draft(bool wild_integers, bool wild) {
    Problem& p = problem;
    const bool own_ids = below(2) == 1;
    const int64_t size = own_ids ? 1 + below(p.vocab) : p.vocab;
    p.draft = logits(p.batch * p.num_nodes, size, wild);
    p.draft_batch_stride = p.num_nodes * p.draft.node_stride;
    if (!own_ids) return;
    const int64_t* const offsets = integers<int64_t>(size, wild ? -size : 0, p.vocab - size + 1, wild_integers);
    draft_vocab = std::make_unique<DraftVocab>(offsets, 1, size, p.vocab);
    p.draft_vocab = draft_vocab.get();
  }
};

struct Results {
  std::vector<int64_t> output_ids;
  std::vector<int32_t> num_accepted, accepted;
  bool operator==(const Results&) const = default;
};

Results run(Problem problem, void (Walk::*rule)(int64_t), Threads threads) {
  const size_t nodes = static_cast<size_t>(problem.batch * problem.num_nodes),
               batch = static_cast<size_t>(problem.batch);
  Results results{std::vector<int64_t>(nodes), std::vector<int32_t>(batch), std::vector<int32_t>(nodes - batch)};
  problem.output_ids = results.output_ids.data();
  problem.num_accepted = results.num_accepted.data();
  problem.accepted = results.accepted.data();
  Walk walk(problem, threads);
  for (int64_t row = 0; row < problem.batch; ++row) (walk.*rule)(row);
  return results;
}

void check_rules(bool wild) {
  const Arguments arguments(wild);
  const Problem& p = arguments.problem;
  for (const auto rule : {&Walk::tree, &Walk::block, &Walk::typical}) {
    if (rule == &Walk::block && p.parents) continue;
    const Results results = run(p, rule, nullptr);
    require(results == run(p, rule, share_out), "threads change results");
    for (const int64_t id : results.output_ids) require(id >= -1 && id < p.vocab, "an id outside the vocabulary");
    for (const int32_t count : results.num_accepted) require(count >= 0 && count < p.num_nodes, "a count");
    for (const int32_t node : results.accepted) require(node >= -1 && node < p.num_nodes, "a node");
  }
}

// Known answers of Philox-4x32-10, from its authors' Random123 library: counter and key of zeros.
void check_philox() {
  const Philox zeros(0, 0, 0);
  const uint32_t expected[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  for (int i = 0; i < 4; ++i) {
    require(zeros.words[i] == expected[i], "Philox");
    require(zeros.uniform(i) > 0 && zeros.uniform(i) < 1, "uniform");
  }
}

}  // namespace

int main() {
  check_philox();
  for (const Element element : kElements) {
    check_blocks(element);
    check_unreadable(element);
  }
  for (int trial = 0; trial < 400; ++trial) check_rules(trial % 2 == 1);
  std::printf("verification: sums, rules, random numbers\n");
}
