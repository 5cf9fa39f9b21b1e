// Tokens drawn from scores, row by row: k3.sampling.Recipe.draw. Scaled scores, weights and their sums are float64 and as in
// the definition, but nothing is sorted beyond what stays, and only what stays is weighed.
#include <algorithm>
#include <functional>

#include "arena.h"
#include "best.h"
#include "math.h"

namespace {

constexpr i64 ROWS = 16, FIRST_SORTED = 64;  // scores whose best bounds the k-th; scores sorted before any more are

// k3.sampling.uniform for drawing from the target: Philox4x32-10, 52 bits in [0, 1).
double uniform(i64 seed, i64 sample, i64 position) {
  using u32 = std::uint32_t;
  using u64 = std::uint64_t;
  u32 c[4] = {u32(position), u32(u64(position) >> 32), u32(sample), 0}, k[2] = {u32(seed), u32(u64(seed) >> 32)};
  for (int round = 0; round < 10; ++round, k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u) {
    const u64 p = u64(c[0]) * 0xD2511F53u, q = u64(c[2]) * 0xCD9E8D57u;
    const u32 next[4] = {u32(q >> 32) ^ c[1] ^ k[0], u32(q), u32(p >> 32) ^ c[3] ^ k[1], u32(p)};
    std::copy(next, next + 4, c);
  }
  return double((u64(c[0] >> 6) << 26) + (c[1] >> 6)) * 0x1p-52;
}

// The k-th largest of n values, 0 < k <= n. work: [n]. It is not below the k-th largest of the best of every ROWS values.
double kth_largest(const double* x, i64 n, i64 k, double* work) {
  i64 m = (n + ROWS - 1) / ROWS;
  std::copy(x, x + m, work);
  for (i64 from = m; from < n; from += m)
    for (i64 j = 0; j < std::min(m, n - from); ++j) work[j] = std::max(work[j], x[from + j]);
  double floor = -std::numeric_limits<double>::infinity();
  if (k <= m) std::nth_element(work, work + k - 1, work + m, std::greater<>{}), floor = work[k - 1];
  m = 0;
  for (i64 i = 0; i < n; ++i)
    if (x[i] >= floor) work[m++] = x[i];
  std::nth_element(work, work + k - 1, work + m, std::greater<>{});
  return work[k - 1];
}

// exp(x - peak) of n values to y (may be x); returns their sum.
double exponentials(const double* x, i64 n, double peak, double* y) {
  Vec<double> total{};
  i64 i = 0;
  for (constexpr i64 L = Lanes<double>::n; i < n; i += L) {
    const bool is_whole = n - i >= L;
    const Vec<double> e = vexp<double>((is_whole ? load(x + i) : load_part(x + i, n - i)) - peak);
    if (is_whole) store(y + i, e), total += e;
    else store_part(y + i, e, n - i), total += load_part(y + i, n - i);
  }
  return sum<double>(total);
}

// What stays: every score above the edge, and the first `places` of those that equal it.
struct Edge {
  double value;
  i64 places;
};

// Of n values in any order, which are sorted as far as need be: those with less than `top_p` of the weight before them.
Edge nucleus(double* x, i64 n, double peak, double top_p, double* work) {
  const double total = exponentials(x, n, peak, work);
  double sum = 0;
  Edge edge{peak, 0};
  for (i64 sorted = 0, i = 0; i < n; ++i) {
    if (i == sorted) {
      sorted = std::min(n, sorted ? sorted * 4 : FIRST_SORTED);
      if (sorted < n) std::nth_element(x + i, x + sorted, x + n, std::greater<>{});
      std::sort(x + i, x + sorted, std::greater<>{});
      exponentials(x + i, sorted - i, peak, work + i);
    }
    const double p = work[i] / total;
    sum += p;
    if (!(sum - p < top_p)) break;
    edge = {x[i], x[i] == edge.value ? edge.places + 1 : 1};
  }
  return edge;
}

// Those of n values that stay and their ids, to where they come from or elsewhere; returns how many.
i64 staying(const double* x, const i64* ids, i64 n, Edge edge, double* kept, i64* kept_ids) {
  i64 m = 0;
  for (i64 i = 0; i < n; ++i)
    if (x[i] > edge.value || (x[i] == edge.value && edge.places-- > 0)) kept[m] = x[i], kept_ids[m++] = ids ? ids[i] : i;
  return m;
}

// The first of n weights, of any sum, up to which more than the share u lies; n if there is none.
i64 picked(const double* weights, i64 n, double u) {
  double total = 0, sum = 0;
  for (i64 i = 0; i < n; ++i) total += weights[i];
  for (i64 i = 0; i < n; ++i)
    if ((sum += weights[i]) > u * total) return i;
  return n;
}

}  // namespace

// scores: [rows * group, vocabulary] at the stride. reals: [rows, 3] temperature, top_p, min_p. whole: [rows, 4] seed, sample,
// top_k (0: all), whether greedy. position, drawn: [rows * group]. A best score that is not finite is drawn.
template <typename T>
static void k3_draw(const T* scores, i64 stride, const double* reals, const i64* whole, const i64* position, i64* drawn, i64 n_rows,
                    i64 group, i64 vocabulary) {
  const i64 n = vocabulary;
  Arena arena;
  arena.reserve<double>(4 * aligned<double>(n));
  double *x = arena.take<double>(n), *kept = arena.take<double>(n), *work = arena.take<double>(n);
  i64* ids = arena.take<i64>(n);
  for (i64 t = 0; t < n_rows * group; ++t, scores += stride) {
    const double *real = reals + t / group * 3, temperature = real[0], top_p = real[1], min_p = real[2];
    const i64 *number = whole + t / group * 4, top_k = number[2];
    drawn[t] = best(scores, n);
    if (number[3] || !std::isfinite(scores[drawn[t]])) continue;
    const double peak = double(scores[drawn[t]]) / temperature;
    for (i64 i = 0; i < n; ++i) x[i] = double(scores[i]) / temperature;
    double edge = -std::numeric_limits<double>::infinity();
    if (top_k > 0 && top_k < n) edge = kth_largest(x, n, top_k, work);
    i64 m = staying(x, nullptr, n, {edge, n}, kept, ids);
    if (top_p < 1) {
      std::copy(kept, kept + m, x);
      m = staying(kept, ids, m, nucleus(x, m, peak, top_p, work), kept, ids);
    }
    const double total = exponentials(kept, m, peak, kept), floor = min_p * (1 / total);
    for (i64 i = 0; i < m; ++i) kept[i] = kept[i] / total < floor ? 0 : kept[i] / total;
    const i64 at = picked(kept, m, uniform(number[0], number[1], position[t]));
    drawn[t] = at < m ? ids[at] : n - 1;
  }
}
K3_BOTH(k3_draw,
        (const T* scores, i64 stride, const double* reals, const i64* whole, const i64* position, i64* drawn, i64 n_rows, i64 group,
         i64 vocabulary),
        (scores, stride, reals, whole, position, drawn, n_rows, group, vocabulary))
