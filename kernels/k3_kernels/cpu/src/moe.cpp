// Expert choice and routed experts: k3_kernels.reference.moe.
#include <algorithm>

#include "arena.h"
#include "gemm.h"
#include "rows.h"

namespace {

// The largest of `score` that are not taken, one after the other, marking each; ties go to the lower index.
template <typename T> inline i64 take_largest(const T* score, i64 n, bool* taken) {
  i64 best = -1;
  for (i64 i = 0; i < n; ++i)
    if (!taken[i] && (best < 0 || score[i] > score[best] || (score[i] != score[i] && score[best] == score[best]))) best = i;
  taken[best] = true;
  return best;
}

// -inf to all experts outside the `kept` groups with the largest sums of their two best scores.
template <typename T> inline void limit_groups(T* score, i64 n, i64 groups, i64 kept, T* sum, bool* taken) {
  constexpr T nothing = -std::numeric_limits<T>::infinity();
  const i64 size = n / groups;
  for (i64 g = 0; g < groups; ++g) {
    T first = nothing, second = nothing;
    for (i64 i = g * size; i < (g + 1) * size; ++i)
      if (score[i] > first) second = first, first = score[i];
      else if (score[i] > second) second = score[i];
    sum[g] = size > 1 ? first + second : first;
    taken[g] = false;
  }
  for (i64 j = 0; j < kept; ++j) take_largest(sum, groups, taken);
  for (i64 g = 0; g < groups; ++g)
    if (!taken[g]) std::fill(score + g * size, score + (g + 1) * size, nothing);
}

// Scores of all experts, [experts] padded to whole vectors.
template <typename T> inline void scores(const T* x, const T* gate, i64 experts, i64 width, bool is_softmax, T* y) {
  constexpr i64 L = Lanes<T>::n;
  const T* rows[L];
  for (i64 e = 0; e < experts; e += L) {
    for (i64 j = 0; j < L; ++j) rows[j] = gate + std::min(e + j, experts - 1) * width;
    const Vec<T> logit = dots(x, rows, width);
    store(y + e, is_softmax ? logit : vsigmoid<T>(logit));
  }
  if (!is_softmax) return;
  const T peak = *std::max_element(y, y + experts);
  T total = 0;
  for (i64 e = 0; e < experts; ++e) total += y[e] = std::exp(y[e] - peak);
  for (i64 e = 0; e < experts; ++e) y[e] /= total;
}

}  // namespace

// ids, weight: [tokens, k].
template <typename T>
static void k3_route(const T* x, i64 stride, const T* gate, const T* bias, i64* ids, T* weight, i64 tokens, i64 experts,
                     i64 width, i64 k, i64 groups, i64 kept_groups, i64 is_softmax, i64 renormalize, double scaling) {
  const i64 n = experts + Lanes<T>::n;
  Arena arena;
  arena.reserve<T>(3 * aligned<T>(n) + aligned<T>(n));
  T *score = arena.take<T>(n), *biased = arena.take<T>(n), *sum = arena.take<T>(n);
  bool* taken = arena.take<bool>(n);
  for (i64 t = 0; t < tokens; ++t, x += stride, ids += k, weight += k) {
    scores(x, gate, experts, width, is_softmax != 0, score);
    over<T>(experts, biased, [&](auto at) { return at(score) + at(bias); });
    if (groups > kept_groups) limit_groups(biased, experts, groups, kept_groups, sum, taken);
    std::fill(taken, taken + experts, false);
    T total = 0;
    for (i64 j = 0; j < k; ++j) {
      ids[j] = take_largest(biased, experts, taken);
      total += weight[j] = score[ids[j]];
    }
    const T factor = renormalize && k > 1 ? T(scaling) / (total + T(1e-20)) : T(scaling);
    for (i64 j = 0; j < k; ++j) weight[j] *= factor;
  }
}
K3_BOTH(k3_route,
        (const T* x, i64 stride, const T* gate, const T* bias, i64* ids, T* weight, i64 tokens, i64 experts, i64 width,
         i64 k, i64 groups, i64 kept_groups, i64 is_softmax, i64 renormalize, double scaling),
        (x, stride, gate, bias, ids, weight, tokens, experts, width, k, groups, kept_groups, is_softmax, renormalize, scaling))

// Pairs (token, choice) grouped by expert, those of experts held elsewhere left out. z: [tokens, Z]; w13: [E, 2F, Z] and
// w2: [E, Z, F] packed. y: [tokens, Z], the choices of a token added in their order.
template <typename T>
static void k3_experts(const T* z, i64 stride, const i64* ids, const T* weight, i64 first, i64 experts, const char* w13,
                       i64 is_narrow13, const char* w2, i64 is_narrow2, i64 tokens, i64 k, i64 width, i64 inner, double beta,
                       double linear_beta, T* y) {
  const i64 pairs = tokens * k;
  Arena arena;
  arena.reserve<T>(aligned<T>(pairs * width) * 2 + aligned<T>(pairs * 2 * inner) + aligned<T>(pairs * inner));
  T *in = arena.take<T>(pairs * width), *out = arena.take<T>(pairs * width);
  T *gate_up = arena.take<T>(pairs * 2 * inner), *active = arena.take<T>(pairs * inner);
  std::vector<i64> end(experts + 1, 0), place(pairs, -1);
  for (i64 i = 0; i < pairs; ++i)
    if (const i64 e = ids[i] - first; e >= 0 && e < experts) ++end[e + 1];
  for (i64 e = 0; e < experts; ++e) end[e + 1] += end[e];
  std::vector<i64> next(end.begin(), end.end() - 1);
  for (i64 i = 0; i < pairs; ++i)
    if (const i64 e = ids[i] - first; e >= 0 && e < experts) {
      place[i] = next[e]++;
      std::memcpy(in + place[i] * width, z + i / k * stride, width * sizeof(T));
    }
  Matrix<T> up{w13, 2 * inner, width, is_narrow13}, down{w2, width, inner, is_narrow2};
  for (i64 e = 0; e < experts; ++e) {
    const i64 lo = end[e], n = end[e + 1] - lo;
    if (n == 0) continue;
    up.data = w13 + e * up.bytes(), down.data = w2 + e * down.bytes();
    multiply<T>(in + lo * width, width, up, gate_up + lo * 2 * inner, 2 * inner, n);
    for (i64 i = lo; i < lo + n; ++i)
      situ(gate_up + i * 2 * inner, gate_up + (i * 2 + 1) * inner, active + i * inner, inner, T(beta), T(linear_beta));
    multiply<T>(active + lo * inner, inner, down, out + lo * width, width, n);
  }
  for (i64 t = 0; t < tokens; ++t, y += width)
    over<T>(width, y, [&](auto at) {
      Vec<T> acc{};
      for (i64 i = t * k; i < (t + 1) * k; ++i)
        if (place[i] >= 0) acc += at(out + place[i] * width) * weight[i];
      return acc;
    });
}
K3_BOTH(k3_experts,
        (const T* z, i64 stride, const i64* ids, const T* weight, i64 first, i64 experts, const char* w13, i64 is_narrow13,
         const char* w2, i64 is_narrow2, i64 tokens, i64 k, i64 width, i64 inner, double beta, double linear_beta, T* y),
        (z, stride, ids, weight, first, experts, w13, is_narrow13, w2, is_narrow2, tokens, k, width, inner, beta, linear_beta, y))

// A whole feed-forward block on one rank, after its norm: blocks.MoeBlock. Null data: the model has no such part.
template <typename T> struct MoeBlock {
  const T *gate, *bias, *norm;
  Matrix<T> down, w13, w2, up, shared_up, shared_down;
  i64 first, experts, width, k, groups, kept_groups, is_softmax, renormalize;
  double scaling, beta, linear_beta, eps;
};

template <typename T> static void k3_moe_block(const MoeBlock<T>* m, const T* x, i64 stride, i64 tokens, T* y) {
  const i64 width = m->width, z_width = m->w2.outputs, inner = m->w2.inputs, shared = m->shared_down.inputs;
  Arena arena(1);
  arena.reserve<T>(aligned<T>(tokens * z_width) * 2 + aligned<T>(tokens * m->k) * 3 + aligned<T>(tokens * shared) * 2 +
                   aligned<T>(tokens * shared) + aligned<T>(tokens * width));
  i64* ids = arena.take<i64>(tokens * m->k);
  T *weight = arena.take<T>(tokens * m->k), *z = arena.take<T>(tokens * z_width), *routed = arena.take<T>(tokens * z_width);
  k3_route(x, stride, m->gate, m->bias, ids, weight, tokens, m->experts, width, m->k, m->groups, m->kept_groups, m->is_softmax,
           m->renormalize, m->scaling);
  const T* in = x;
  i64 in_stride = stride;
  if (m->down.data) multiply(x, stride, m->down, z, z_width, tokens), in = z, in_stride = z_width;
  k3_experts(in, in_stride, ids, weight, m->first, m->experts, static_cast<const char*>(m->w13.data), m->w13.is_narrow,
             static_cast<const char*>(m->w2.data), m->w2.is_narrow, tokens, m->k, z_width, inner, m->beta, m->linear_beta, routed);
  if (m->norm)
    for (i64 t = 0; t < tokens; ++t) rms_norm(routed + t * z_width, m->norm, routed + t * z_width, z_width, T(m->eps));
  if (m->up.data) multiply(routed, z_width, m->up, y, width, tokens);
  else std::memcpy(y, routed, tokens * width * sizeof(T));
  if (!m->shared_down.data) return;
  T *gate_up = arena.take<T>(tokens * 2 * shared), *active = arena.take<T>(tokens * shared), *own = arena.take<T>(tokens * width);
  multiply(x, stride, m->shared_up, gate_up, 2 * shared, tokens);
  for (i64 t = 0; t < tokens; ++t)
    situ(gate_up + t * 2 * shared, gate_up + (t * 2 + 1) * shared, active + t * shared, shared, T(m->beta), T(m->linear_beta));
  multiply(active, shared, m->shared_down, own, width, tokens);
  over<T>(tokens * width, y, [&](auto at) { return at(y) + at(own); });
}
K3_BOTH(k3_moe_block, (const MoeBlock<T>* m, const T* x, i64 stride, i64 tokens, T* y), (m, x, stride, tokens, y))
