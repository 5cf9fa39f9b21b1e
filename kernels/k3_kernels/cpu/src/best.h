// The best of many scores.
#pragma once
#include "simd.h"

// The index of the largest of n values, the first of equal ones; the first NaN where there is one, as torch has it.
template <typename T> static inline i64 best(const T* x, i64 n) {
  constexpr i64 L = Lanes<T>::n;
  Vec<T> peaks = fill<T>(-std::numeric_limits<T>::infinity()), nans{};
  i64 i = 0;
  for (; i + L <= n; i += L) {
    const Vec<T> v = load(x + i);
    peaks = largest_of(v, peaks);
    nans += v - v;
  }
  T peak = largest<T>(peaks), odd = sum<T>(nans);
  for (; i < n; ++i) peak = x[i] > peak ? x[i] : peak, odd += x[i] - x[i];
  if (odd != odd)  // NaN, or an infinity
    for (i64 j = 0; j < n; ++j)
      if (x[j] != x[j]) return j;
  for (i64 j = 0; j < n; ++j)
    if (x[j] == peak) return j;
  return 0;
}
