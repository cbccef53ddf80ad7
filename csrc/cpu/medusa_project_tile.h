// Products of weight rows with packed rows of states, for the instruction set of the including translation unit.
//
// Weights are read as they lie, once, kWide rows side by side; packed rows come in panels of kRows:
//   panel[step][row][kStep]     kStep numbers of each row of the panel, then the next kStep
// so a tile reads its panel as one stream. Every product is summed by lanes, in the order of the steps, whatever tile
// it is in.
#pragma once

#include "cpu/medusa_project.h"
#include "cpu/vec.h"

namespace specdec {
namespace medusa {
namespace {

constexpr int kRows = 4;                               // of a panel; the last one may have fewer
constexpr int kWide = FloatVec::kLanes == 16 ? 6 : 2;  // 24 sums in 32 registers, or 8 in 16
constexpr int64_t kSteps = 256;                        // that a lane sums before lanes are summed, for precision
constexpr int64_t kAheadBytes = 32 << 10;              // of weights between those in use and those being fetched
constexpr int64_t kPanelsBytes = 512 << 10;            // of panels that should stay in the second-level cache

// Weights of type T, everything else in Real.
template <class V>
struct SingleArithmetic {
  using Vec = V;
  using Real = typename V::Real;
  using Operand = Real;
  using OperandVec = V;
  static constexpr int kStep = V::kLanes;

  static SPECDEC_INLINE OperandVec load(const Operand* p) { return V::load(p); }
  template <class T>
  static SPECDEC_INLINE OperandVec load_some(const T* p, int count) {
    return V::load_some(p, count);
  }
  template <class T>
  static SPECDEC_INLINE OperandVec load_step(const T* p) {
    if constexpr (sizeof(T) == sizeof(Real)) {
      return V::load(p);
    } else {
      return V::load_some(p, kStep);
    }
  }
  static SPECDEC_INLINE void store(OperandVec x, Operand* p) { x.store(p); }
  static SPECDEC_INLINE Vec dot(Vec sum, OperandVec a, OperandVec b) { return V::fma(a, b, sum); }
};

#if defined(__AVX512BF16__)
// Pairs of bf16 into sums of fp32.
struct PairArithmetic {
  using Vec = FloatVec;
  using Real = float;
  using Operand = BFloat16;
  using OperandVec = __m512i;
  static constexpr int kStep = 32;

  static SPECDEC_INLINE OperandVec load(const Operand* p) { return _mm512_loadu_si512(p); }
  static SPECDEC_INLINE OperandVec load_some(const BFloat16* p, int count) {
    return _mm512_maskz_loadu_epi16(count >= 32 ? ~0u : (1u << count) - 1u, p);
  }
  static SPECDEC_INLINE OperandVec load_step(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static SPECDEC_INLINE void store(OperandVec x, Operand* p) { _mm512_storeu_si512(p, x); }
  static SPECDEC_INLINE Vec dot(Vec sum, OperandVec a, OperandVec b) {
    return {_mm512_dpbf16_ps(sum.v, bit_cast<__m512bh>(a), bit_cast<__m512bh>(b))};
  }
};
#endif

template <class A>
SPECDEC_INLINE int64_t padded(int64_t width) {
  return (width + A::kStep - 1) / A::kStep * A::kStep;
}

template <class A>
int64_t operand_bytes(int64_t count, int64_t width) {
  return count * padded<A>(width) * static_cast<int64_t>(sizeof(typename A::Operand));
}

template <class A, class T>
void pack(const char* const* rows, int64_t count, int64_t width, void* operands) {
  auto* to = static_cast<typename A::Operand*>(operands);
  for (int64_t first = 0; first < count; first += kRows) {
    const int64_t last = smaller<int64_t>(first + kRows, count);
    for (int64_t c = 0; c < width; c += A::kStep) {
      const int some = static_cast<int>(smaller<int64_t>(A::kStep, width - c));
      for (int64_t row = first; row < last; ++row, to += A::kStep) {
        A::store(A::load_some(reinterpret_cast<const T*>(rows[row]) + c, some), to);
      }
    }
  }
}

// The sum of each of four vectors. One order of summation for a kind of vector.
template <class Vec>
SPECDEC_INLINE void sum_each(const Vec (&x)[kRows], typename Vec::Real (&to)[kRows]) {
  for (int i = 0; i < kRows; ++i) to[i] = x[i].sum();
}
#if defined(__AVX512F__)
SPECDEC_INLINE void sum_each(const Avx512Vec (&x)[kRows], float (&to)[kRows]) {
  // Sums of lanes 0, 2 and 1, 3 of each 128 bits for two vectors at a time; then of all four.
  const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(x[0].v, x[1].v), _mm512_unpackhi_ps(x[0].v, x[1].v));
  const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(x[2].v, x[3].v), _mm512_unpackhi_ps(x[2].v, x[3].v));
  const __m512 c = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps(c, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#endif

// Rows of weights that a tile asks memory for while it multiplies: a later tile reads them.
struct Ahead {
  const char* data;
  int64_t stride;
  int count;
};

// Columns begin ... end - 1 of a tile, added to its products or, the first time, stored.
template <class A, class T, int kCount>
SPECDEC_INLINE void multiply_columns(const T* const (&weights)[kWide], const typename A::Operand* panel, int64_t begin,
                                     int64_t end, const Ahead& ahead, int64_t num_wide, typename A::Real* products) {
  using Vec = typename A::Vec;
  Vec sums[kWide][kCount];
  SPECDEC_UNROLL_LOOP
  for (int i = 0; i < kWide; ++i) {
    SPECDEC_UNROLL_LOOP
    for (int j = 0; j < kCount; ++j) sums[i][j] = Vec::all(0);
  }
  const auto add = [&](int64_t c, const auto& load) __attribute__((always_inline)) {
    typename A::OperandVec rows[kCount];
    SPECDEC_UNROLL_LOOP
    for (int j = 0; j < kCount; ++j) rows[j] = A::load(panel + c * kCount + j * A::kStep);
    SPECDEC_UNROLL_LOOP
    for (int i = 0; i < kWide; ++i) {
      const typename A::OperandVec weight = load(weights[i] + c);
      SPECDEC_UNROLL_LOOP
      for (int j = 0; j < kCount; ++j) sums[i][j] = A::dot(sums[i][j], weight, rows[j]);
    }
  };
  int64_t c = begin;
  for (; c + A::kStep <= end; c += A::kStep) {
    for (int i = 0; i < ahead.count; ++i) {
      __builtin_prefetch(ahead.data + i * ahead.stride + c * static_cast<int64_t>(sizeof(T)), 0, 2);
    }
    add(c, [](const T* p) __attribute__((always_inline)) { return A::load_step(p); });
  }
  if (c < end) {
    const int rest = static_cast<int>(end - c);
    add(c, [rest](const T* p) __attribute__((always_inline)) { return A::load_some(p, rest); });
  }
  SPECDEC_UNROLL_LOOP
  for (int i = 0; i < kWide; ++i) {
    if (i >= num_wide) break;
    Vec four[kRows];
    SPECDEC_UNROLL_LOOP
    for (int j = 0; j < kRows; ++j) four[j] = sums[i][smaller(j, kCount - 1)];
    typename A::Real all[kRows];
    sum_each(four, all);
    for (int j = 0; j < kCount; ++j) products[j * kChunk + i] = begin == 0 ? all[j] : products[j * kChunk + i] + all[j];
  }
}

template <class A, class T, int kCount>
void multiply_tile(const T* const (&weights)[kWide], const typename A::Operand* panel, int64_t width,
                   const Ahead& ahead, int64_t num_wide, typename A::Real* products) {
  constexpr int64_t kColumns = kSteps * A::kStep;
  for (int64_t c = 0; c < width; c += kColumns) {
    multiply_columns<A, T, kCount>(weights, panel, c, smaller(c + kColumns, width), ahead, num_wide, products);
  }
}

// One kWide of weight rows times `count` packed rows. Rows that come kAheadBytes later, or next, are fetched meanwhile,
// some with each panel, so that memory is busy all the time.
template <class A, class T>
void multiply_wide(const Weights& weights, int64_t first, const typename A::Operand* panels, int64_t count, bool fetch,
                   typename A::Real* products) {
  const T* rows[kWide];
  for (int i = 0; i < kWide; ++i) {
    rows[i] = reinterpret_cast<const T*>(weights.data + smaller(first + i, weights.count - 1) * weights.stride);
  }
  const int64_t num_panels = (count + kRows - 1) / kRows, per_panel = (kWide + num_panels - 1) / num_panels;
  const int64_t row_bytes = weights.width * static_cast<int64_t>(sizeof(T));
  int64_t next = first + larger<int64_t>(1, kAheadBytes / (row_bytes * kWide)) * kWide;
  const int64_t end = fetch ? smaller(next + kWide, weights.count_ahead) : next;
  for (int64_t row = 0; row < count; row += kRows) {
    const Ahead ahead{weights.data + next * weights.stride, weights.stride,
                      static_cast<int>(larger<int64_t>(0, smaller(per_panel, end - next)))};
    next += per_panel;
    const auto* const panel = panels + row * padded<A>(weights.width);
    auto* const to = products + row * kChunk + first;
    const int64_t num_wide = weights.count - first;
    switch (count - row) {
      case 1:
        multiply_tile<A, T, 1>(rows, panel, weights.width, ahead, num_wide, to);
        break;
      case 2:
        multiply_tile<A, T, 2>(rows, panel, weights.width, ahead, num_wide, to);
        break;
      case 3:
        multiply_tile<A, T, 3>(rows, panel, weights.width, ahead, num_wide, to);
        break;
      default:
        multiply_tile<A, T, kRows>(rows, panel, weights.width, ahead, num_wide, to);
    }
  }
}

template <class A, class T>
void multiply(const Weights& weights, const void* operands, int64_t count, void* products) {
  const auto* const panels = static_cast<const typename A::Operand*>(operands);
  const int64_t block = larger<int64_t>(1, kPanelsBytes / operand_bytes<A>(kRows, weights.width)) * kRows;
  for (int64_t row = 0; row < count; row += block) {
    for (int64_t first = 0; first < weights.count; first += kWide) {
      multiply_wide<A, T>(weights, first, panels + row * padded<A>(weights.width), smaller(block, count - row),
                          row == 0, static_cast<typename A::Real*>(products) + row * kChunk);
    }
  }
}

}  // namespace
}  // namespace medusa
}  // namespace specdec
