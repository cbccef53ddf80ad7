// Drives the torch-free core of the Medusa heads and of the linear layers, meant to be built with AddressSanitizer and
// UBSan: all element types, own and shared projections, borders of panels, tiles and chunks, on one and on several
// threads. Every buffer ends where the next page must not be touched, since sanitizers do not see masked loads. Logits
// must match sums in double, the ranking the logits, and nothing may depend on the number of threads.
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

#include "cpu/decoder_kernel.h"
#include "cpu/medusa_project_kernel.h"
#include "cpu/medusa_project_stages.h"
#include "linear_trial.h"

namespace {

using namespace specdec;
using namespace specdec::medusa;

struct Trial {
  Trial(Element element, int64_t b, int64_t m, int64_t r, int64_t c, int64_t v, bool own, bool base)
      : hidden(element, b * c),
        embedding(element, b * c),
        w_root(element, 2 * c * c),
        b_root(element, c),
        w_res(element, m * r * c * c),
        b_res(element, m * r * c),
        w_out(element, (own ? m : 1) * v * c) {
    const int64_t item = bytes_of(element);
    call.element = element;
    call.batch = b, call.num_heads = m, call.num_layers = r, call.width = c, call.vocab = v;
    call.own_projection = own, call.include_base = base;
    call.hidden = hidden.data(), call.hidden_stride = c * item;
    if (below(2)) {
      const decoder::Kernel* const rows = element == Element::kDouble
                                              ? decoder::Row<ArrayVec<double, 4>, double>::kernel()
                                              : decoder::kernel_of(element);
      call.root = {embedding.data(), c * item, w_root.data(), 2 * c * item, below(2) ? b_root.data() : nullptr, rows};
    }
    call.w_res = w_res.data();
    call.w_res_strides[0] = r * c * c * item, call.w_res_strides[1] = c * c * item, call.w_res_strides[2] = c * item;
    call.b_res = below(2) ? b_res.data() : nullptr;
    call.b_res_strides[0] = r * c * item, call.b_res_strides[1] = c * item;
    call.w_out = w_out.data();
    call.w_out_strides[0] = own ? v * c * item : 0, call.w_out_strides[1] = c * item;
  }

  // The state of an output row (batch row, output) in double, and the largest number on the way to it.
  std::vector<double> state(int64_t b, int64_t output, double* most) const {
    const int64_t c = call.width, head = output - call.include_base;
    std::vector<double> x(hidden.values.begin() + b * c, hidden.values.begin() + (b + 1) * c);
    *most = largest(x);
    if (head >= 0 && call.root.embedding) add_root(embedding.values.data() + b * c, &x, most);
    for (int64_t layer = 0; head >= 0 && layer < call.num_layers; ++layer) {
      const int64_t at = head * call.num_layers + layer;
      std::vector<double> y = x;
      for (int64_t i = 0; i < c; ++i) {
        double sum = call.b_res ? b_res.values[at * c + i] : 0;
        for (int64_t j = 0; j < c; ++j) sum += x[j] * w_res.values[(at * c + i) * c + j];
        y[i] += sum / (1 + std::exp(-sum));
      }
      x = y;
      *most = std::max(*most, largest(x));
    }
    return x;
  }

  static double largest(const std::vector<double>& x) {
    double most = 0;
    for (const double value : x) most = std::max(most, std::abs(value));
    return most;
  }

  void add_root(const double* e, std::vector<double>* x, double* most) const {
    const int64_t c = call.width;
    double squares = 0;
    for (int64_t i = 0; i < c; ++i) squares += e[i] * e[i];
    std::vector<double> joined = *x;
    for (int64_t i = 0; i < c; ++i) joined.push_back(e[i] / std::sqrt(squares / static_cast<double>(c) + 1e-6));
    for (int64_t i = 0; i < c; ++i) {
      double sum = call.root.bias ? b_root.values[i] : 0;
      for (int64_t j = 0; j < 2 * c; ++j) sum += joined[j] * w_root.values[2 * c * i + j];
      (*x)[i] += sum / (1 + std::exp(-sum));
    }
    *most = std::max({*most, largest(joined), largest(*x)});
  }

  Numbers hidden, embedding, w_root, b_root, w_res, b_res, w_out;
  Call call{};
};

// A state that is small by cancellation has the error of a large one, so tolerances are relative to the largest number
// that it comes from.
void check_logits(const Trial& trial, const Numbers& logits) {
  const Call& call = trial.call;
  const bool is_half = call.element == Element::kHalf || call.element == Element::kBFloat16;
  const double tolerance = call.element == Element::kDouble ? 1e-12 : is_half ? 2e-2 : 1e-5;
  for (int64_t row = 0; row < call.batch * call.num_outputs(); ++row) {
    const int64_t output = row % call.num_outputs();
    double most;
    const std::vector<double> x = trial.state(row / call.num_outputs(), output, &most);
    const double* w = trial.w_out.values.data() + (call.own_projection ? output * call.vocab * call.width : 0);
    for (int64_t i = 0; i < call.vocab; ++i, w += call.width) {
      double want = 0, magnitude = 0;
      for (int64_t j = 0; j < call.width; ++j) want += x[j] * w[j], magnitude += most * std::abs(w[j]);
      require(std::abs(logits.at(row * call.vocab + i) - want) <= tolerance * magnitude, "a logit");
    }
  }
}

struct Ranked {
  std::vector<float> values, lse;
  std::vector<int64_t> ids;
  bool operator==(const Ranked&) const = default;
};

Ranked rank(const Machine& machine, const Call& call, int64_t k, const std::vector<int64_t>& vocab_map) {
  const int64_t rows = call.batch * call.num_outputs();
  Ranked to{std::vector<float>(rows * k), std::vector<float>(rows), std::vector<int64_t>(rows * k)};
  project_topk(machine, call,
               {k, vocab_map.empty() ? nullptr : vocab_map.data(), 1, to.values.data(), to.ids.data(), to.lse.data()});
  return to;
}

void check_ranking(const Call& call, const Numbers& logits, const Ranked& ranked, int64_t k,
                   const std::vector<int64_t>& vocab_map) {
  for (int64_t row = 0; row < call.batch * call.num_outputs(); ++row) {
    std::vector<int64_t> order(static_cast<size_t>(call.vocab));
    std::iota(order.begin(), order.end(), 0);
    const auto logit = [&](int64_t i) { return static_cast<float>(logits.at(row * call.vocab + i)); };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logit(a) > logit(b); });
    for (int64_t i = 0; i < k; ++i) {
      require(ranked.values[row * k + i] == logit(order[i]), "a value");
      require(ranked.ids[row * k + i] == (vocab_map.empty() ? order[i] : vocab_map[order[i]]), "an id");
    }
    const double most = logit(order[0]);
    double sum = 0;
    for (int64_t i = 0; i < call.vocab; ++i) sum += std::exp(logit(i) - most);
    const double lse = most + std::log(sum);
    require(std::abs(ranked.lse[row] - lse) <= 1e-5 * (1 + std::abs(lse)), "log-sum-exp");
  }
}

void try_one(Element element, const Kernel* kernel) {
  const bool own = below(2), base = !own && below(2);
  const bool is_long = below(4) == 0;  // rows that do not stay in the first-level cache
  const int64_t c = is_long ? 2051 : pick({1, 3, 16, 31, 33, 64, 150});
  const int64_t v = is_long ? pick({1, 5, 6, 13}) : pick({1, 5, 6, 13, 191, 192, 193, 500});
  const Trial trial(element, 1 + below(6), 1 + below(4), is_long ? 0 : below(3), c, v, own, base);
  const Call& call = trial.call;
  const int64_t k = 1 + below(std::min<int64_t>(v, 64));
  std::vector<int64_t> vocab_map(below(2) ? v : 0);
  for (int64_t& id : vocab_map) id = below(1 << 20);
  const Numbers logits(element, call.batch * call.num_outputs() * v);
  project(machine_of(kernel, 1), call, logits.data());
  check_logits(trial, logits);
  const Ranked first = rank(machine_of(kernel, 1), call, k, vocab_map);
  check_ranking(call, logits, first, k, vocab_map);
  require(rank(machine_of(kernel, 3), call, k, vocab_map) == first, "threads change the ranking");
}

// Enough weights for several threads.
void try_threads(Element element, const Kernel* kernel) {
  const Trial trial(element, 2, 2, 1, 520, 1500, false, true);
  const Ranked first = rank(machine_of(kernel, 1), trial.call, 64, {});
  for (const int64_t threads : {2, 5}) {
    require(rank(machine_of(kernel, threads), trial.call, 64, {}) == first, "threads change the ranking");
  }
}

template <class A, class T>
void try_kernel(Element element) {
  const Kernel* const kernel = kernel_for<A, T>();
  for (int i = 0; i < 16; ++i) try_one(element, kernel);
  try_threads(element, kernel);
  try_linear(element, kernel);
}

}  // namespace

int main() {
  using Single = SingleArithmetic<FloatVec>;
  try_kernel<Single, float>(Element::kFloat);
#if defined(__AVX2__)  // plain vectors take minutes to compile under sanitizers, and what differs is how they load
  try_kernel<Single, BFloat16>(Element::kBFloat16);
  try_kernel<Single, Half>(Element::kHalf);
  try_kernel<SingleArithmetic<ArrayVec<double, 4>>, double>(Element::kDouble);
#endif
#if defined(__AVX512BF16__)
  try_kernel<PairArithmetic, BFloat16>(Element::kBFloat16);
#endif
  std::printf("ok\n");
}
