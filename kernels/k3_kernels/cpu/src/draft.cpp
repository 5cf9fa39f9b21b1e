// A drafter of latent attention: its context rows, one layer of its block, and the sequential head's drafts. Rules of
// k3/model/dspark.py.
#include <algorithm>

#include "arena.h"
#include "attend.h"
#include "best.h"
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

}  // namespace

// Where a drafter's rows lie: blocks.DraftRing. pool: [slots * places, layers, page_tokens, C + E] at the strides.
template <typename T> struct DraftRing {
  T* pool;
  i64 unit_stride, layer_stride, token_stride, places, page_tokens, window;
  T* row(i64 slot, i64 position, i64 layer) const {
    const i64 unit = slot * places + position / page_tokens % places;
    return pool + unit * unit_stride + layer * layer_stride + position % page_tokens * token_stride;
  }
};

// Cosine and sine of a position, [dim / 2] each, times `amplitude`.
template <typename T> inline void angles(i64 position, const T* frequencies, T amplitude, i64 dim, T* cosine, T* sine) {
  for (i64 i = 0; i < dim / 2; ++i) {
    const T turn = T(position) * frequencies[i];
    cosine[i] = std::cos(turn) * amplitude, sine[i] = std::sin(turn) * amplitude;
  }
}

// The rows before the anchor at `base` that are read, in the order of the ring; returns how many.
template <typename T>
inline i64 context_of(const DraftRing<T>& ring, i64 layer, i64 slot, i64 start, i64 base, const T** keys) {
  const i64 length = ring.places * ring.page_tokens, newest = base - 1;
  const i64 oldest = std::max({start, base - ring.window, i64(0)});
  i64 n = 0;
  for (i64 j = 0; j < std::min(length, base); ++j) {
    const i64 position = newest - (newest - j) % length;  // newest >= j
    if (position >= oldest) keys[n++] = ring.row(slot, position, layer);
  }
  return n;
}

// blocks.DraftBlock. entry gives latent and shared key; key_up and value_up [H, N, C] and [H, V, C] at head_stride.
template <typename T> struct DraftBlock {
  Matrix<T> query_down, query_up, entry, out, gate_up, down;
  const T *input_norm, *query_norm, *latent_norm, *key_up, *value_up, *mlp_norm, *frequencies;
  i64 heads, nope, rope, rank, value_dim, head_stride, is_interleaved;
  double scale, eps, amplitude;
};

// x, y: [rows * group, D], slots at base .. of each row: they see the ring's rows before base, and each other.
template <typename T>
static void k3_draft_block(const DraftBlock<T>* m, const T* x, const DraftRing<T>* ring, i64 layer, const i64* slots, const i64* starts,
                           const i64* bases, i64 n_rows, i64 group, T* y) {
  const i64 tokens = n_rows * group, size = m->out.outputs, width = m->rank + m->rope, head = m->nope + m->rope, half = m->rope / 2;
  const i64 n_values = m->heads * m->value_dim, low = m->query_down.outputs, inner = m->down.inputs;
  const i64 most_keys = ring->places * ring->page_tokens + group + BLOCK;
  const T eps = T(m->eps);
  Arena arena(1);
  arena.reserve<T>(aligned<T>(tokens * size) * 2 + aligned<T>(tokens * low) + aligned<T>(tokens * width) +
                   aligned<T>(tokens * m->heads * head) + aligned<T>(width) + aligned<T>(m->rank) + aligned<T>(tokens * n_values) +
                   aligned<T>(tokens * 2 * inner) + aligned<T>(tokens * inner) + aligned<T>(tokens * half) * 2 +
                   aligned<const T*>(most_keys) * 2);
  T *h = arena.take<T>(tokens * size), *sum = arena.take<T>(tokens * size), *compact = arena.take<T>(tokens * low);
  T *own = arena.take<T>(tokens * width), *query = arena.take<T>(tokens * m->heads * head), *q = arena.take<T>(width);
  T *o = arena.take<T>(m->rank), *values = arena.take<T>(tokens * n_values);
  T *gate_up = arena.take<T>(tokens * 2 * inner), *active = arena.take<T>(tokens * inner);
  T *cosine = arena.take<T>(tokens * half), *sine = arena.take<T>(tokens * half);
  const T** keys = arena.take<const T*>(most_keys);

  for (i64 t = 0; t < tokens; ++t) {
    angles(bases[t / group] + t % group, m->frequencies, T(m->amplitude), m->rope, cosine + t * half, sine + t * half);
    rms_norm(x + t * size, m->input_norm, h + t * size, size, eps);
  }
  multiply(h, size, m->entry, own, width, tokens);
  multiply(h, size, m->query_down, compact, low, tokens);
  for (i64 t = 0; t < tokens; ++t) {
    T* row = own + t * width;
    rms_norm(row, m->latent_norm, row, m->rank, eps);
    turn(row + m->rank, cosine + t * half, sine + t * half, m->rope, m->is_interleaved != 0);
    rms_norm(compact + t * low, m->query_norm, compact + t * low, low, eps);
  }
  multiply(compact, low, m->query_up, query, m->heads * head, tokens);
  for (i64 b = 0; b < n_rows; ++b) {
    i64 n_keys = context_of(*ring, layer, slots[b], starts[b], bases[b], keys);
    for (i64 g = 0; g < group; ++g) keys[n_keys++] = own + (b * group + g) * width;
    for (i64 j = n_keys; j % BLOCK; ++j) keys[j] = keys[n_keys - 1];  // whole vectors of keys are looked at
    for (i64 t = b * group; t < (b + 1) * group; ++t)
      for (i64 i = 0; i < m->heads; ++i) {
        const T* plain = query + (t * m->heads + i) * head;
        absorb(plain, m->key_up + i * m->head_stride, m->nope, m->rank, q);
        std::memcpy(q + m->rank, plain + m->nope, m->rope * sizeof(T));
        turn(q + m->rank, cosine + t * half, sine + t * half, m->rope, m->is_interleaved != 0);
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
        (const DraftBlock<T>* m, const T* x, const DraftRing<T>* ring, i64 layer, const i64* slots, const i64* starts, const i64* bases,
         i64 n_rows, i64 group, T* y),
        (m, x, ring, layer, slots, starts, bases, n_rows, group, y))

// blocks.DraftContext: what makes the rows of all layers. entry gives latent and shared key of a layer.
template <typename T> struct DraftRows {
  Matrix<T> entry;
  const T* norm;
};
template <typename T> struct DraftContext {
  Matrix<T> projection;
  const T *norm, *frequencies;
  const DraftRows<T>* layers;
  i64 n_layers, rank, rope, is_interleaved;
  double eps, amplitude;
};

// taps: [tokens, projection.inputs]; y: [tokens, layers, C + E].
template <typename T>
static void k3_draft_context(const DraftContext<T>* m, const T* taps, i64 stride, const i64* positions, i64 tokens, T* y) {
  const i64 size = m->projection.outputs, width = m->rank + m->rope, row = m->n_layers * width, half = m->rope / 2;
  Arena arena(1);
  arena.reserve<T>(aligned<T>(tokens * size) + aligned<T>(half) * 2);
  T *h = arena.take<T>(tokens * size), *cosine = arena.take<T>(half), *sine = arena.take<T>(half);
  multiply(taps, stride, m->projection, h, size, tokens);
  for (i64 t = 0; t < tokens; ++t) rms_norm(h + t * size, m->norm, h + t * size, size, T(m->eps));
  for (i64 l = 0; l < m->n_layers; ++l) multiply(h, size, m->layers[l].entry, y + l * width, row, tokens);
  for (i64 t = 0; t < tokens; ++t) {
    angles(positions[t], m->frequencies, T(m->amplitude), m->rope, cosine, sine);
    for (i64 l = 0; l < m->n_layers; ++l) {
      T* own = y + t * row + l * width;
      rms_norm(own, m->layers[l].norm, own, m->rank, T(m->eps));
      turn(own + m->rank, cosine, sine, m->rope, m->is_interleaved != 0);
    }
  }
}
K3_BOTH(k3_draft_context, (const DraftContext<T>* m, const T* taps, i64 stride, const i64* positions, i64 tokens, T* y),
        (m, taps, stride, positions, tokens, y))

// The rows of the anchor and the accepted drafts of each group into the ring; nobody's row 0 keeps nothing.
template <typename T>
static void k3_draft_rows(const DraftContext<T>* m, const T* taps, i64 stride, const DraftRing<T>* ring, const i64* table_slots,
                          const i64* rows, const i64* starts, const i64* accepted, i64 accepted_stride, i64 n_rows, i64 group) {
  const i64 width = m->rank + m->rope, inputs = m->projection.inputs, most = n_rows * group;
  Arena arena(2);
  arena.reserve<T>(aligned<T>(most * inputs) + aligned<T>(most * m->n_layers * width) + aligned<i64>(most) * (sizeof(i64) / sizeof(T)));
  T *kept = arena.take<T>(most * inputs), *made = arena.take<T>(most * m->n_layers * width);
  i64 *positions = arena.take<i64>(most), n = 0;
  for (i64 b = 0; b < n_rows; ++b)
    for (i64 g = 0; rows[b] != 0 && g < group && g <= accepted[b * accepted_stride]; ++g, ++n) {
      positions[n] = starts[b] + g;
      std::memcpy(kept + n * inputs, taps + (b * group + g) * stride, inputs * sizeof(T));
    }
  if (n == 0) return;
  k3_draft_context(m, kept, inputs, positions, n, made);
  const T* from = made;
  for (i64 b = 0; b < n_rows; ++b)
    for (i64 g = 0; rows[b] != 0 && g < group && g <= accepted[b * accepted_stride]; ++g)
      for (i64 l = 0; l < m->n_layers; ++l, from += width)
        std::memcpy(ring->row(table_slots[rows[b]], starts[b] + g, l), from, width * sizeof(T));
}
K3_BOTH(k3_draft_rows,
        (const DraftContext<T>* m, const T* taps, i64 stride, const DraftRing<T>* ring, const i64* table_slots, const i64* rows,
         const i64* starts, const i64* accepted, i64 accepted_stride, i64 n_rows, i64 group),
        (m, taps, stride, ring, table_slots, rows, starts, accepted, accepted_stride, n_rows, group))

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
