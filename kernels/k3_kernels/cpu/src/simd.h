// What loops over rows are made of: a result depends neither on the instruction set's width, nor on alignment, nor on
// which other rows are in the call.
#pragma once
#include <cmath>
#include <limits>

#include "vector.h"

// Halves of a vector folded onto each other by f down to one lane; the compilers' shuffle where they have it.
template <typename V> constexpr i64 lanes_of = sizeof(V) / sizeof(Element<V>);
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define K3_SHUFFLE 1
#endif
#endif
#ifdef K3_SHUFFLE
template <typename V, i64... I> K3_INLINE auto picked(V a, V b, std::integer_sequence<i64, I...>) {
  return __builtin_shufflevector(a, b, I...);
}
template <i64 FROM, i64... I> constexpr auto from(std::integer_sequence<i64, I...>) {
  return std::integer_sequence<i64, (FROM + I)...>{};
}
template <typename V, typename F> K3_INLINE Element<V> reduced(V v, F f) {
  constexpr i64 half = lanes_of<V> / 2;
  constexpr auto lower = std::make_integer_sequence<i64, half>{};
  if constexpr (sizeof(V) > 16) return reduced(f(picked(v, v, lower), picked(v, v, from<half>(lower))), f);
  else if constexpr (half == 1) return f(v[0], v[1]);
  else return f(f(v[0], v[2]), f(v[1], v[3]));
}
// In blocks of 2 W lanes: the lower W of a, onto which its upper ones are added, then those of b.
template <i64 W, typename V, i64... I> K3_INLINE V folded(V a, V b, std::integer_sequence<i64, I...>) {
  constexpr i64 n = sizeof...(I);
  return __builtin_shufflevector(a, b, (I & W ? n + I - W : I)...) + __builtin_shufflevector(a, b, (I & W ? n + I : I + W)...);
}
// Lane i of the result is the sum of vector i; as many vectors as lanes, each summed as by `sum`.
template <typename V, i64 W = lanes_of<V> / 2> K3_INLINE V sums(V* v) {
  if constexpr (W == 0) return v[0];
  else {
    for (i64 j = 0; j < W; ++j) v[j] = folded<W>(v[j], v[j + W], std::make_integer_sequence<i64, lanes_of<V>>{});
    return sums<V, W / 2>(v);
  }
}
#else
template <typename V, typename F> K3_INLINE Element<V> reduced(V v, F f) {
  for (i64 half = lanes_of<V> / 2; half; half /= 2)
    for (i64 i = 0; i < half; ++i) v[i] = f(v[i], v[i + half]);
  return v[0];
}
template <typename V> K3_INLINE V sums(V* v) {
  V y{};
  for (i64 i = 0; i < lanes_of<V>; ++i) y[i] = reduced(v[i], [](auto a, auto b) { return a + b; });
  return y;
}
#endif
template <typename V, typename F> K3_INLINE Element<V> reduced(Two<V> v, F f) { return reduced(f(v.lo, v.hi), f); }
template <typename V> K3_INLINE Two<V> sums(Two<V>* v) {
  constexpr i64 n = lanes_of<Two<V>>;
  V half[n];
  for (i64 j = 0; j < n; ++j) half[j] = v[j].lo + v[j].hi;
  return {sums(half), sums(half + n / 2)};
}
template <typename T> K3_INLINE T sum(Vec<T> v) {
  return reduced(v, [](auto a, auto b) { return a + b; });
}
template <typename T> K3_INLINE T largest(Vec<T> v) {
  return reduced(v, [](auto a, auto b) { return largest_of(a, b); });
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

// Products of one vector with as many others as there are lanes; as many at once as there are registers for.
template <typename T> K3_INLINE Vec<T> dots(const T* x, const T* const* others, i64 n) {
  constexpr i64 L = Lanes<T>::n, at_once = REGISTER == 64 ? L : 4;
  Vec<T> all[L];
  for (i64 first = 0; first < L; first += at_once, others += at_once) {
    Vec<T> acc[at_once] = {};
    i64 i = 0;
    for (; i + L <= n; i += L) {
      const Vec<T> a = load(x + i);
      for (i64 j = 0; j < at_once; ++j) acc[j] += a * load(others[j] + i);
    }
    if (i < n) {
      const Vec<T> a = load_part(x + i, n - i);
      for (i64 j = 0; j < at_once; ++j) acc[j] += a * load_part(others[j] + i, n - i);
    }
    for (i64 j = 0; j < at_once; ++j) all[first + j] = acc[j];
  }
  return sums(all);
}
