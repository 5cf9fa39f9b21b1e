// Vectors of 64 bytes, whatever the machine has: float 16 lanes, double 8. Where registers are narrower a vector is a tree
// of halves, lane by lane the same arithmetic: a compiler keeps vectors of its own that no register holds in memory.
#pragma once
#include <cstring>
#include <type_traits>
#include <utility>

#include "abi.h"

#define K3_INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr i64 REGISTER = 64;  // bytes
#elif defined(__AVX__)
constexpr i64 REGISTER = 32;
#else
constexpr i64 REGISTER = 16;
#endif

template <typename V> struct Two {
  V lo, hi;
};
template <typename T, i64 BYTES> struct Wide {
  using V = Two<typename Wide<T, BYTES / 2>::V>;
};
template <typename T> struct Wide<T, REGISTER> {
  typedef T V __attribute__((vector_size(REGISTER)));
};
template <typename T> using Vec = typename Wide<T, 64>::V;

template <typename T> struct Lanes {
  static constexpr i64 n = 64 / sizeof(T);
};
// Integers as wide as the lanes of T.
template <typename T> using Int = Vec<std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>>;

template <typename V> struct ElementOf {
  using type = std::remove_reference_t<decltype(std::declval<V&>()[0])>;
};
template <typename V> struct ElementOf<Two<V>> : ElementOf<V> {};
template <typename V> using Element = typename ElementOf<V>::type;

template <typename V> K3_INLINE Two<V> two(V lo, V hi) { return {lo, hi}; }
#define K3_OPERATOR(OP)                                                                                                \
  template <typename V> K3_INLINE auto operator OP(Two<V> a, Two<V> b) { return two(a.lo OP b.lo, a.hi OP b.hi); }     \
  template <typename V> K3_INLINE auto operator OP(Two<V> a, Element<V> b) { return two(a.lo OP b, a.hi OP b); }       \
  template <typename V> K3_INLINE auto operator OP(Element<V> a, Two<V> b) { return two(a OP b.lo, a OP b.hi); }
K3_OPERATOR(+)
K3_OPERATOR(-)
K3_OPERATOR(*)
K3_OPERATOR(/)
K3_OPERATOR(&)
K3_OPERATOR(<<)
K3_OPERATOR(>>)
K3_OPERATOR(<)
K3_OPERATOR(>)
K3_OPERATOR(==)
#undef K3_OPERATOR
template <typename V> K3_INLINE Two<V> operator-(Two<V> a) { return {-a.lo, -a.hi}; }
template <typename V> K3_INLINE void operator+=(Two<V>& a, Two<V> b) { a.lo += b.lo, a.hi += b.hi; }

// Lanes of a where the mask is set, of b elsewhere.
template <typename M, typename V> K3_INLINE V select(M mask, V a, V b) { return mask ? a : b; }
template <typename M, typename V> K3_INLINE Two<V> select(Two<M> mask, Two<V> a, Two<V> b) {
  return {select(mask.lo, a.lo, b.lo), select(mask.hi, a.hi, b.hi)};
}
template <typename V> K3_INLINE V largest_of(V a, V b) { return select(a > b, a, b); }

// What is done register by register. As: a vector of V's lanes, as numbers of the other kind or as their bits.
template <typename V> struct Registers {
  K3_INLINE V load(const char* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  K3_INLINE void store(char* p, V v) { std::memcpy(p, &v, sizeof v); }
  template <typename As> K3_INLINE As convert(V v) { return __builtin_convertvector(v, As); }
  template <typename As> K3_INLINE As bits(V v) { return Registers<As>::load(reinterpret_cast<const char*>(&v)); }
};
template <typename V> struct Registers<Two<V>> {
  using Half = Registers<V>;
  K3_INLINE Two<V> load(const char* p) { return {Half::load(p), Half::load(p + sizeof(V))}; }
  K3_INLINE void store(char* p, Two<V> v) { Half::store(p, v.lo), Half::store(p + sizeof(V), v.hi); }
  template <typename As> K3_INLINE As convert(Two<V> v) {
    return {Half::template convert<decltype(As::lo)>(v.lo), Half::template convert<decltype(As::lo)>(v.hi)};
  }
  template <typename As> K3_INLINE As bits(Two<V> v) {
    return {Half::template bits<decltype(As::lo)>(v.lo), Half::template bits<decltype(As::lo)>(v.hi)};
  }
};
template <typename As, typename V> K3_INLINE As convert(V v) { return Registers<V>::template convert<As>(v); }
template <typename As, typename V> K3_INLINE As bits(V v) { return Registers<V>::template bits<As>(v); }

template <typename T> K3_INLINE Vec<T> load(const T* p) { return Registers<Vec<T>>::load(reinterpret_cast<const char*>(p)); }
template <typename T> K3_INLINE void store(T* p, Vec<T> v) { Registers<Vec<T>>::store(reinterpret_cast<char*>(p), v); }
template <typename T> K3_INLINE Vec<T> fill(T x) { return Vec<T>{} + x; }
// The first n lanes (0 <= n < lanes), zero beyond.
template <typename T> K3_INLINE Vec<T> load_part(const T* p, i64 n) {
  T lanes[Lanes<T>::n] = {};
  std::memcpy(lanes, p, n * sizeof(T));
  return load(lanes);
}
template <typename T> K3_INLINE void store_part(T* p, Vec<T> v, i64 n) { std::memcpy(p, &v, n * sizeof(T)); }
