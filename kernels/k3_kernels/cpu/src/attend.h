// Attention in absorbed form, key by key: what verify groups over pages and a drafter's block over its ring share.
// A query meets blocks of keys in their order, so its result depends on nothing but its own keys. Up-projections are
// [N or V, C] per head.
#pragma once
#include "rows.h"

constexpr i64 BLOCK = 64;  // keys

// One query: running maximum and sum of exponentials beside its unnormalised output.
template <typename T> struct Running {
  T peak = -std::numeric_limits<T>::infinity(), total = 0;
};

// o += sum over the keys of p key[0 .. n).
template <typename T> static inline void add_values(const T* p, const T* const* keys, i64 n_keys, T* o, i64 n) {
  constexpr i64 L = Lanes<T>::n;
  i64 i = 0;
  for (; i + 4 * L <= n; i += 4 * L) {
    Vec<T> a = load(o + i), b = load(o + i + L), c = load(o + i + 2 * L), d = load(o + i + 3 * L);
    for (i64 j = 0; j < n_keys; ++j) {
      const T* k = keys[j] + i;
      a += load(k) * p[j], b += load(k + L) * p[j], c += load(k + 2 * L) * p[j], d += load(k + 3 * L) * p[j];
    }
    store(o + i, a), store(o + i + L, b), store(o + i + 2 * L, c), store(o + i + 3 * L, d);
  }
  over<T>(n - i, o + i, [&](auto at) {
    Vec<T> acc = at(o + i);
    for (i64 j = 0; j < n_keys; ++j) acc += at(keys[j] + i) * p[j];
    return acc;
  });
}

template <typename T>
static inline void meet(const T* q, const T* const* keys, i64 n_keys, i64 width, i64 value_width, T scale, Running<T>& now, T* o) {
  constexpr i64 L = Lanes<T>::n;
  alignas(64) T p[BLOCK];
  constexpr T nothing = -std::numeric_limits<T>::infinity();
  T peak = now.peak;
  for (i64 j = 0; j < n_keys; j += L) {
    store(p + j, dots(q, keys + j, width) * scale);
    for (i64 i = 0; i < L; ++i)
      if (j + i >= n_keys) p[j + i] = nothing;
    for (i64 i = j; i < j + L; ++i) peak = p[i] > peak || p[i] != p[i] ? p[i] : peak;
  }
  if (peak != now.peak) {
    const T shrink = std::exp(now.peak - peak);
    now.total *= shrink;
    over<T>(value_width, o, [&](auto at) { return at(o) * shrink; });
    now.peak = peak;
  }
  Vec<T> total{};
  for (i64 j = 0; j < n_keys; j += L) {
    const Vec<T> e = vexp<T>(load(p + j) - peak);
    total += e;
    store(p + j, e);
  }
  now.total += sum<T>(total);
  add_values(p, keys, n_keys, o, value_width);
}

// The end of a query: its output over the sum; nothing seen gives nothing.
template <typename T> static inline void finish(const Running<T>& now, T* o, i64 n) {
  const T inverse = now.total > 0 || now.total != now.total ? T(1) / now.total : T(0);
  over<T>(n, o, [&](auto at) { return at(o) * inverse; });
}

// A head's plain query in the latent space: to[c] = sum over n of q[n] up[n, c], even and odd n apart.
template <typename T> static inline void absorb(const T* q, const T* up, i64 nope, i64 rank, T* to) {
  over<T>(rank, to, [&](auto at) {
    Vec<T> even{}, odd{};
    i64 n = 0;
    for (; n + 2 <= nope; n += 2) even += at(up + n * rank) * q[n], odd += at(up + (n + 1) * rank) * q[n + 1];
    if (n < nope) even += at(up + n * rank) * q[n];
    return even + odd;
  });
}

// A head's output from the latent space: to[v] = o . up[v].
template <typename T> static inline void expand(const T* o, const T* up, i64 value_dim, i64 rank, T* to) {
  constexpr i64 L = Lanes<T>::n;
  for (i64 v = 0; v < value_dim; v += L) {
    const T* rows[L];
    for (i64 j = 0; j < L; ++j) rows[j] = up + (v + j < value_dim ? v + j : v) * rank;
    store_part(to + v, dots(o, rows, rank), value_dim - v < L ? value_dim - v : L);
  }
}
