// Vectors of a fixed number of lanes, whatever the machine has: a result depends neither on the instruction set's
// width, nor on alignment, nor on which other rows are in the call. float: 16 lanes, double: 8.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "abi.h"

template <typename T> struct Lanes;
template <> struct Lanes<float> {
  static constexpr i64 n = 16;
  typedef float V __attribute__((vector_size(64)));
  typedef std::int32_t I __attribute__((vector_size(64)));
};
template <> struct Lanes<double> {
  static constexpr i64 n = 8;
  typedef double V __attribute__((vector_size(64)));
  typedef std::int64_t I __attribute__((vector_size(64)));
};
template <typename T> using Vec = typename Lanes<T>::V;
template <typename T> using Int = typename Lanes<T>::I;

#define K3_INLINE static inline __attribute__((always_inline))

template <typename T> K3_INLINE Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <typename T> K3_INLINE void store(T* p, Vec<T> v) { std::memcpy(p, &v, sizeof v); }
template <typename T> K3_INLINE Vec<T> fill(T x) { return Vec<T>{} + x; }
// The first n lanes (0 <= n < lanes), zero beyond.
template <typename T> K3_INLINE Vec<T> load_part(const T* p, i64 n) {
  Vec<T> v{};
  std::memcpy(&v, p, n * sizeof(T));
  return v;
}
template <typename T> K3_INLINE void store_part(T* p, Vec<T> v, i64 n) { std::memcpy(p, &v, n * sizeof(T)); }

// Sum of the lanes, halves folded onto each other; the compilers' shuffle where they have it, the same additions.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define K3_SHUFFLE 1
#endif
#endif
#ifdef K3_SHUFFLE
K3_INLINE float sum_of(Vec<float> v) {
  const auto a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  const auto c = b + __builtin_shufflevector(b, b, 2, 3, 2, 3);
  return c[0] + c[1];
}
K3_INLINE double sum_of(Vec<double> v) {
  const auto a = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
  const auto b = a + __builtin_shufflevector(a, a, 2, 3, 2, 3);
  return b[0] + b[1];
}
template <typename T> K3_INLINE T sum(Vec<T> v) { return sum_of(v); }

// Lane i of the result is the sum of vector i; as many vectors as lanes, each summed as by `sum`.
K3_INLINE Vec<float> sums(Vec<float> (&v)[16]) {
  for (int j = 0; j < 8; ++j)
    v[j] = __builtin_shufflevector(v[j], v[j + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(v[j], v[j + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  for (int j = 0; j < 4; ++j)
    v[j] = __builtin_shufflevector(v[j], v[j + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(v[j], v[j + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int j = 0; j < 2; ++j)
    v[j] = __builtin_shufflevector(v[j], v[j + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(v[j], v[j + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  return __builtin_shufflevector(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         __builtin_shufflevector(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
K3_INLINE Vec<double> sums(Vec<double> (&v)[8]) {
  for (int j = 0; j < 4; ++j)
    v[j] = __builtin_shufflevector(v[j], v[j + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(v[j], v[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  for (int j = 0; j < 2; ++j)
    v[j] = __builtin_shufflevector(v[j], v[j + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(v[j], v[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(v[0], v[1], 0, 8, 2, 10, 4, 12, 6, 14) +
         __builtin_shufflevector(v[0], v[1], 1, 9, 3, 11, 5, 13, 7, 15);
}
#else
template <typename T> K3_INLINE T sum(Vec<T> v) {
  for (i64 half = Lanes<T>::n / 2; half; half /= 2)
    for (i64 i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}
template <typename V, int N> K3_INLINE V sums(V (&v)[N]) {
  V y{};
  for (int i = 0; i < N; ++i) y[i] = sum<std::remove_reference_t<decltype(v[0][0])>>(v[i]);
  return y;
}
#endif
template <typename T> K3_INLINE T largest(Vec<T> v) {
  for (i64 half = Lanes<T>::n / 2; half; half /= 2)
    for (i64 i = 0; i < half; ++i) v[i] = v[i] > v[i + half] ? v[i] : v[i + half];
  return v[0];
}

template <typename T> K3_INLINE T dot(const T* a, const T* b, i64 n) {
  constexpr i64 L = Lanes<T>::n;
  Vec<T> acc{};
  i64 i = 0;
  for (; i + L <= n; i += L) acc += load(a + i) * load(b + i);
  if (i < n) acc += load_part(a + i, n - i) * load_part(b + i, n - i);
  return sum<T>(acc);
}

// y[i] = f(i, vector of lanes i ..) over 0 <= i < n. F: (i64 at, auto load) with `load(p)` a vector of p[at ..].
template <typename T, typename F> K3_INLINE void over(i64 n, T* y, F f) {
  constexpr i64 L = Lanes<T>::n;
  i64 i = 0;
  for (; i + L <= n; i += L) store(y + i, f([i](const T* p) { return load(p + i); }));
  if (i < n) {
    const i64 rest = n - i;
    store_part(y + i, f([i, rest](const T* p) { return load_part(p + i, rest); }), rest);
  }
}

// Products of one vector with as many others as there are lanes.
template <typename T> K3_INLINE Vec<T> dots(const T* x, const T* const* others, i64 n) {
  constexpr i64 L = Lanes<T>::n;
  Vec<T> acc[L] = {};
  i64 i = 0;
  for (; i + L <= n; i += L) {
    const Vec<T> a = load(x + i);
    for (i64 j = 0; j < L; ++j) acc[j] += a * load(others[j] + i);
  }
  if (i < n) {
    const Vec<T> a = load_part(x + i, n - i);
    for (i64 j = 0; j < L; ++j) acc[j] += a * load_part(others[j] + i, n - i);
  }
  return sums(acc);
}
