// A drafter of latent attention: its context rows, one layer of its block, and the sequential head's drafts. Rules of
// k3/model/dspark.py.
#include "arena.h"
#include "attend.h"
#include "gemm.h"

namespace {

// The last axis turned by its position's cosine and sine, [dim / 2] each.
template <typename T> inline void turn(T* x, const T* cosine, const T* sine, i64 dim, bool is_interleaved) {
  for (i64 i = 0; i < dim / 2; ++i) {
    T &a = x[is_interleaved ? 2 * i : i], &b = x[is_interleaved ? 2 * i + 1 : i + dim / 2];
    const T first = a * cosine[i] - b * sine[i], second = a * sine[i] + b * cosine[i];
    a = first, b = second;
  }
}

// The index of the largest of n values, the first of equal ones; the first NaN where there is one, as torch has it.
template <typename T> inline i64 best(const T* x, i64 n) {
  constexpr i64 L = Lanes<T>::n;
  Vec<T> peaks = fill<T>(-std::numeric_limits<T>::infinity()), nans{};
  i64 i = 0;
  for (; i + L <= n; i += L) {
    const Vec<T> v = load(x + i);
    peaks = v > peaks ? v : peaks;
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

}  // namespace

// blocks.DraftBlock. entry gives latent and shared key; key_up and value_up [H, N, C] and [H, V, C] at head_stride.
template <typename T> struct DraftBlock {
  Matrix<T> query_down, query_up, entry, out, gate_up, down;
  const T *input_norm, *query_norm, *latent_norm, *key_up, *value_up, *mlp_norm;
  i64 heads, nope, rope, rank, value_dim, head_stride, is_interleaved;
  double scale, eps;
};

// x, y: [rows * group, D]; cosine, sine: [rows * group, rope / 2]. context: [rows, n_context, C + E] at the strides;
// seen: [rows, n_context + group], of the context and of the block's own slots.
template <typename T>
static void k3_draft_block(const DraftBlock<T>* m, const T* x, const T* cosine, const T* sine, const T* context, i64 row_stride,
                           i64 key_stride, const bool* seen, i64 n_context, i64 n_rows, i64 group, T* y) {
  const i64 tokens = n_rows * group, size = m->out.outputs, width = m->rank + m->rope, head = m->nope + m->rope;
  const i64 n_values = m->heads * m->value_dim, low = m->query_down.outputs, inner = m->down.inputs;
  const T eps = T(m->eps);
  Arena arena(1);
  arena.reserve<T>(aligned<T>(tokens * size) * 2 + aligned<T>(tokens * low) + aligned<T>(tokens * width) +
                   aligned<T>(tokens * m->heads * head) + aligned<T>(width) + aligned<T>(m->rank) + aligned<T>(tokens * n_values) +
                   aligned<T>(tokens * 2 * inner) + aligned<T>(tokens * inner) + aligned<const T*>(n_context + group + BLOCK) * 2);
  T *h = arena.take<T>(tokens * size), *sum = arena.take<T>(tokens * size), *compact = arena.take<T>(tokens * low);
  T *own = arena.take<T>(tokens * width), *query = arena.take<T>(tokens * m->heads * head), *q = arena.take<T>(width);
  T *o = arena.take<T>(m->rank), *values = arena.take<T>(tokens * n_values);
  T *gate_up = arena.take<T>(tokens * 2 * inner), *active = arena.take<T>(tokens * inner);
  const T** keys = arena.take<const T*>(n_context + group + BLOCK);

  for (i64 t = 0; t < tokens; ++t) rms_norm(x + t * size, m->input_norm, h + t * size, size, eps);
  multiply(h, size, m->entry, own, width, tokens);
  multiply(h, size, m->query_down, compact, low, tokens);
  for (i64 t = 0; t < tokens; ++t) {
    T* row = own + t * width;
    rms_norm(row, m->latent_norm, row, m->rank, eps);
    turn(row + m->rank, cosine + t * (m->rope / 2), sine + t * (m->rope / 2), m->rope, m->is_interleaved != 0);
    rms_norm(compact + t * low, m->query_norm, compact + t * low, low, eps);
  }
  multiply(compact, low, m->query_up, query, m->heads * head, tokens);
  for (i64 b = 0; b < n_rows; ++b, seen += n_context + group) {
    i64 n_keys = 0;
    for (i64 j = 0; j < n_context + group; ++j)
      if (seen[j])
        keys[n_keys++] = j < n_context ? context + b * row_stride + j * key_stride : own + (b * group + j - n_context) * width;
    for (i64 j = n_keys; n_keys && j % BLOCK; ++j) keys[j] = keys[n_keys - 1];  // whole vectors of keys are looked at
    for (i64 t = b * group; t < (b + 1) * group; ++t)
      for (i64 i = 0; i < m->heads; ++i) {
        const T* plain = query + (t * m->heads + i) * head;
        absorb(plain, m->key_up + i * m->head_stride, m->nope, m->rank, q);
        std::memcpy(q + m->rank, plain + m->nope, m->rope * sizeof(T));
        turn(q + m->rank, cosine + t * (m->rope / 2), sine + t * (m->rope / 2), m->rope, m->is_interleaved != 0);
        Running<T> now;
        std::memset(o, 0, m->rank * sizeof(T));
        for (i64 from = 0; from < n_keys; from += BLOCK)
          meet<T>(q, keys + from, n_keys - from < BLOCK ? n_keys - from : BLOCK, width, m->rank, T(m->scale), now, o);
        finish(now, o, m->rank);
        expand(o, m->value_up + i * m->head_stride, m->value_dim, m->rank, values + t * n_values + i * m->value_dim);
      }
  }
  multiply(values, n_values, m->out, h, size, tokens);
  over<T>(tokens * size, sum, [&](auto at) { return at(x) + at(h); });
  for (i64 t = 0; t < tokens; ++t) rms_norm(sum + t * size, m->mlp_norm, h + t * size, size, eps);
  multiply(h, size, m->gate_up, gate_up, 2 * inner, tokens);
  for (i64 t = 0; t < tokens; ++t) {
    const T *gate = gate_up + t * 2 * inner, *up = gate + inner;
    over<T>(inner, active + t * inner, [&](auto at) { return at(gate) * vsigmoid<T>(at(gate)) * at(up); });
  }
  multiply(active, inner, m->down, h, size, tokens);
  over<T>(tokens * size, y, [&](auto at) { return at(sum) + at(h); });
}
K3_BOTH(k3_draft_block,
        (const DraftBlock<T>* m, const T* x, const T* cosine, const T* sine, const T* context, i64 row_stride, i64 key_stride,
         const bool* seen, i64 n_context, i64 n_rows, i64 group, T* y),
        (m, x, cosine, sine, context, row_stride, key_stride, seen, n_context, n_rows, group, y))

// blocks.DraftContext: what makes the rows of all layers. entry gives latent and shared key of a layer.
template <typename T> struct DraftRows {
  Matrix<T> entry;
  const T* norm;
};
template <typename T> struct DraftContext {
  Matrix<T> projection;
  const T* norm;
  const DraftRows<T>* layers;
  i64 n_layers, rank, rope, is_interleaved;
  double eps;
};

// taps: [tokens, projection.inputs]; cosine, sine: [tokens, rope / 2]; y: [tokens, layers, C + E].
template <typename T>
static void k3_draft_context(const DraftContext<T>* m, const T* taps, i64 stride, const T* cosine, const T* sine, i64 tokens, T* y) {
  const i64 size = m->projection.outputs, width = m->rank + m->rope, row = m->n_layers * width;
  Arena arena(1);
  arena.reserve<T>(aligned<T>(tokens * size));
  T* h = arena.take<T>(tokens * size);
  multiply(taps, stride, m->projection, h, size, tokens);
  for (i64 t = 0; t < tokens; ++t) rms_norm(h + t * size, m->norm, h + t * size, size, T(m->eps));
  for (i64 l = 0; l < m->n_layers; ++l) multiply(h, size, m->layers[l].entry, y + l * width, row, tokens);
  for (i64 t = 0; t < tokens; ++t)
    for (i64 l = 0; l < m->n_layers; ++l) {
      T* own = y + t * row + l * width;
      rms_norm(own, m->layers[l].norm, own, m->rank, T(m->eps));
      turn(own + m->rank, cosine + t * (m->rope / 2), sine + t * (m->rope / 2), m->rope, m->is_interleaved != 0);
    }
}
K3_BOTH(k3_draft_context,
        (const DraftContext<T>* m, const T* taps, i64 stride, const T* cosine, const T* sine, i64 tokens, T* y),
        (m, taps, stride, cosine, sine, tokens, y))

// Greedy drafts of a head without state: draft i is the best of logits[b, i] + out(table[the token before]).
// logits: [rows, n, V]; table: [V, R]; anchor: [rows]; drafts: [rows, n].
template <typename T>
static void k3_draft_tokens(const T* logits, const T* table, const void* out, i64 is_narrow, const i64* anchor, i64* drafts,
                            i64 n_rows, i64 n, i64 vocabulary, i64 rank) {
  const Matrix<T> matrix{out, vocabulary, rank, is_narrow};
  Arena arena(1);
  arena.reserve<T>(aligned<T>(n_rows * rank) + aligned<T>(n_rows * vocabulary));
  T *before = arena.take<T>(n_rows * rank), *score = arena.take<T>(n_rows * vocabulary);
  for (i64 i = 0; i < n; ++i) {
    for (i64 b = 0; b < n_rows; ++b)
      std::memcpy(before + b * rank, table + (i ? drafts[b * n + i - 1] : anchor[b]) * rank, rank * sizeof(T));
    multiply(before, rank, matrix, score, vocabulary, n_rows);
    for (i64 b = 0; b < n_rows; ++b) {
      const T* base = logits + (b * n + i) * vocabulary;
      T* own = score + b * vocabulary;
      over<T>(vocabulary, own, [&](auto at) { return at(own) + at(base); });
      drafts[b * n + i] = best(own, vocabulary);
    }
  }
}
K3_BOTH(k3_draft_tokens,
        (const T* logits, const T* table, const void* out, i64 is_narrow, const i64* anchor, i64* drafts, i64 n_rows, i64 n,
         i64 vocabulary, i64 rank),
        (logits, table, out, is_narrow, anchor, drafts, n_rows, n, vocabulary, rank))
