// Verify groups of a KDA layer, between its projections: k3_kernels.reference.group.verify, both forms.
// States stay as they lie, [V, K]: a step is one pass over them.
#include "arena.h"
#include "gemm.h"
#include "rows.h"

namespace {


// Where a layer's pools lie: values from slot to slot and from head to head; a head's own are contiguous, a state
// [V, K], a window [3, D, w - 1], a tail [3, tail_tokens, D], records [3 (k, u, g), record_tokens, D]: blocks.KdaPools.
template <typename T> struct KdaPools {
  T *states, *windows, *tails, *records;
  i64 state_slot, state_head, window_slot, window_head, tail_slot, tail_head, record_slot, record_head;
  i64 columns, tail_tokens, record_tokens;
};

// Columns i .. of `n` rows of a state decayed, and what they see of the key. rest: columns there are, a vector unless PART.
template <bool PART, typename T, typename N, typename D>
K3_INLINE void forget(N n, const T* in, T* out, const T* k, const T* decay, i64 i, i64 rest, D dim, Vec<T> (&seen)[Lanes<T>::n]) {
  const Vec<T> a = PART ? load_part(decay + i, rest) : load(decay + i), b = PART ? load_part(k + i, rest) : load(k + i);
  for (i64 r = 0; r < n; ++r) {
    const T* from = in + r * dim + i;
    const Vec<T> s = (PART ? load_part(from, rest) : load(from)) * a;
    seen[r] += s * b;
    if (PART) store_part(out + r * dim + i, s, rest);
    else store(out + r * dim + i, s);
  }
}

// The same columns after the delta rule, and what the query reads of them.
template <bool PART, typename T, typename N, typename D>
K3_INLINE void learn(N n, T* state, const T* k, const T* u, const T* q, i64 i, i64 rest, D dim, Vec<T> (&read)[Lanes<T>::n]) {
  const Vec<T> a = PART ? load_part(q + i, rest) : load(q + i), b = PART ? load_part(k + i, rest) : load(k + i);
  for (i64 r = 0; r < n; ++r) {
    T* at = state + r * dim + i;
    const Vec<T> s = (PART ? load_part(at, rest) : load(at)) + b * u[r];
    read[r] += s * a;
    if (PART) store_part(at, s, rest);
    else store(at, s);
  }
}

// `advance` for n <= lanes rows of the state, whose sums are taken together.
template <typename T, typename N, typename D>
K3_INLINE void advance_rows(N n, const T* in, T* out, const T* q, const T* k, const T* decay, const T* v, T beta, D dim, T* o, T* u) {
  constexpr i64 L = Lanes<T>::n;
  Vec<T> seen[L] = {}, read[L] = {};
  i64 i = 0;
  for (; i + L <= dim; i += L) forget<false, T>(n, in, out, k, decay, i, L, dim, seen);
  if (i < dim) forget<true, T>(n, in, out, k, decay, i, dim - i, dim, seen);
  store_part(u, (load_part(v, n) - sums(seen)) * beta, n);
  for (i = 0; i + L <= dim; i += L) learn<false, T>(n, out, k, u, q, i, L, dim, read);
  if (i < dim) learn<true, T>(n, out, k, u, q, i, dim - i, dim, read);
  store_part(o, sums(read), n);
}

// One token into a head's state, read from `in`, left in `out` (may be the same). u: the delta, [V].
template <typename T, typename D>
K3_INLINE void advance_by(D dim, const T* in, T* out, const T* q, const T* k, const T* decay, const T* v, T beta, T* o, T* u) {
  constexpr i64 L = Lanes<T>::n;
  i64 r = 0;
  for (; r + L <= dim; r += L)
    advance_rows<T>(std::integral_constant<i64, L>{}, in + r * dim, out + r * dim, q, k, decay, v + r, beta, dim, o + r, u + r);
  if (r < dim) advance_rows<T>(dim - r, in + r * dim, out + r * dim, q, k, decay, v + r, beta, dim, o + r, u + r);
}

// `advance_by` with the strides of usual head dims known to the compiler: sixteen rows have sixteen addresses.
template <typename T>
inline void advance(const T* in, T* out, const T* q, const T* k, const T* decay, const T* v, T beta, i64 dim, T* o, T* u) {
  if (dim == 32) return advance_by<T>(std::integral_constant<i64, 32>{}, in, out, q, k, decay, v, beta, o, u);
  if (dim == 128) return advance_by<T>(std::integral_constant<i64, 128>{}, in, out, q, k, decay, v, beta, o, u);
  advance_by<T>(dim, in, out, q, k, decay, v, beta, o, u);
}

// A recorded token into a head's state: record [3 (k, u, g)][N][D] at `record`.
template <typename T> inline void fold(T* state, const T* record, i64 part, i64 dim, T* decay) {
  const T *k = record, *u = record + part;
  over<T>(dim, decay, [&](auto at) { return vexp<T>(at(record + 2 * part)); });
  for (i64 r = 0; r < dim; ++r, state += dim)
    over<T>(dim, state, [&](auto at) { return at(state) * at(decay) + at(k) * u[r]; });
}

template <typename T> inline void log_decay(const T* raw, const T* bias, T decay, T bound, i64 dim, T* g) {
  over<T>(dim, g, [&](auto at) {
    const Vec<T> x = at(raw) + at(bias);
    return bound != T(0) ? vsigmoid<T>(x * decay) * bound : vsoftplus<T>(x) * -decay;
  });
}

template <typename T> inline void normalize(T* x, i64 dim, T eps, T factor) {
  const T scale = factor / std::sqrt(dot(x, x, dim) + eps);
  over<T>(dim, x, [&](auto at) { return at(x) * scale; });
}

// The convolution's inputs of a head before the group, [w - 1][3, D], from window [3, D, w - 1] and tail [3, N, D].
template <typename T> inline void gather(const T* window, const T* tail, i64 tail_tokens, i64 from, i64 kept, i64 dim, T* rows) {
  for (i64 j = 0; j < kept; ++j, rows += 3 * dim) {
    const i64 column = from + j;
    for (i64 s = 0; s < 3; ++s)
      if (column < kept)
        for (i64 d = 0; d < dim; ++d) rows[s * dim + d] = window[(s * dim + d) * kept + column];
      else
        std::memcpy(rows + s * dim, tail + (s * tail_tokens + column - kept) * dim, dim * sizeof(T));
  }
}

// What the next group continues from: rows 1 .. w - 1 are the window, those behind the tail.
template <typename T> inline void scatter(const T* rows, i64 group, i64 kept, i64 dim, T* window, T* tail, i64 tail_tokens) {
  for (i64 i = 0; i < 3 * dim; ++i)
    for (i64 j = 0; j < kept; ++j) window[i * kept + j] = rows[(j + 1) * 3 * dim + i];
  for (i64 t = 0; t + 1 < group; ++t)
    for (i64 s = 0; s < 3; ++s)
      std::memcpy(tail + (s * tail_tokens + t) * dim, rows + (kept + 1 + t) * 3 * dim + s * dim, dim * sizeof(T));
}

}  // namespace

// u: [tokens, H, 3, D], raw: [tokens, H, D], beta: [tokens, H], tokens = rows * group at the strides given.
// taps: [H, 3, w, D]. bound 0: a softplus gate. records null: snapshots. o: [tokens, H, D].
template <typename T>
static void k3_kda_group(const T* u, i64 u_stride, const T* raw, i64 raw_stride, const T* beta, i64 beta_stride, const T* taps,
                         const T* bias, const T* decay, double bound, double eps, const i64* slots, const i64* read_columns,
                         const KdaPools<T>* pools, T* o, i64 n_rows, i64 group, i64 heads, i64 dim, i64 conv) {
  const KdaPools<T>& pool = *pools;
  const i64 tail_tokens = pool.tail_tokens, record_tokens = pool.record_tokens;
  const i64 kept = conv - 1, section = 3 * dim, square = dim * dim;
  Arena arena;
  arena.reserve<T>(aligned<T>((kept + group) * section) + aligned<T>(square) + 8 * aligned<T>(section));
  T *in = arena.take<T>((kept + group) * section), *work = arena.take<T>(square), *y = arena.take<T>(section);
  T *g = arena.take<T>(dim), *factor = arena.take<T>(dim), *delta = arena.take<T>(dim);
  const T scale = T(1) / std::sqrt(T(dim));
  for (i64 b = 0; b < n_rows; ++b) {
    const i64 slot = slots[b], from = read_columns[b] > 0 ? read_columns[b] : 0;
    for (i64 h = 0; h < heads; ++h) {
      T* window = pool.windows + slot * pool.window_slot + h * pool.window_head;
      T* tail = pool.tails + slot * pool.tail_slot + h * pool.tail_head;
      T* states = pool.states + slot * pool.columns * pool.state_slot + h * pool.state_head;
      gather(window, tail, tail_tokens, from, kept, dim, in);
      for (i64 t = 0; t < group; ++t)
        std::memcpy(in + (kept + t) * section, u + (b * group + t) * u_stride + h * section, section * sizeof(T));
      scatter(in, group, kept, dim, window, tail, tail_tokens);

      T* record = pool.records ? pool.records + slot * pool.record_slot + h * pool.record_head : nullptr;
      const T* state = states + (record ? 0 : from) * pool.state_slot;
      if (record)
        for (i64 t = 0; t <= read_columns[b]; ++t)
          fold(states, record + t * dim, record_tokens * dim, dim, factor);
      for (i64 t = 0; t < group; ++t) {
        const i64 token = b * group + t;
        const T* tap = taps + h * 3 * conv * dim;
        for (i64 s = 0; s < 3; ++s, tap += conv * dim) {
          const T* x = in + t * section + s * dim;
          over<T>(dim, y + s * dim, [&](auto at) {
            Vec<T> acc = at(tap) * at(x);
            for (i64 j = 1; j < conv; ++j) acc += at(tap + j * dim) * at(x + j * section);
            return acc * vsigmoid<T>(acc);
          });
        }
        normalize(y, dim, T(eps), scale);
        normalize(y + dim, dim, T(eps), T(1));
        log_decay(raw + token * raw_stride + h * dim, bias + h * dim, decay[h], T(bound), dim, g);
        over<T>(dim, factor, [&](auto at) { return vexp<T>(at(g)); });
        const T share = T(1) / (T(1) + std::exp(-beta[token * beta_stride + h]));
        T* next = record ? work : states + t * pool.state_slot;
        advance(state, next, y, y + dim, factor, y + 2 * dim, share, dim, o + (token * heads + h) * dim, delta);
        state = next;
        if (record) {
          T* own = record + t * dim;
          std::memcpy(own, y + dim, dim * sizeof(T));
          std::memcpy(own + record_tokens * dim, delta, dim * sizeof(T));
          std::memcpy(own + 2 * record_tokens * dim, g, dim * sizeof(T));
        }
      }
    }
  }
}
K3_BOTH(k3_kda_group,
        (const T* u, i64 u_stride, const T* raw, i64 raw_stride, const T* beta, i64 beta_stride, const T* taps, const T* bias,
         const T* decay, double bound, double eps, const i64* slots, const i64* read_columns, const KdaPools<T>* pools, T* o,
         i64 n_rows, i64 group, i64 heads, i64 dim, i64 conv),
        (u, u_stride, raw, raw_stride, beta, beta_stride, taps, bias, decay, bound, eps, slots, read_columns, pools, o, n_rows, group,
         heads, dim, conv))

// A whole layer for verify groups, from its normalised input to its output projection: blocks.KdaBlock. entry gives
// convolution inputs, output gate (or, with gate_up, its low-rank factor), the decay gate's factor and beta.
template <typename T> struct KdaBlock {
  Matrix<T> entry, gate_up, decay_up, out;
  const T *taps, *bias, *decay, *norm;
  i64 heads, dim, conv, gate_width;
  double bound, eps, norm_eps;
};

template <typename T>
static void k3_kda_block(const KdaBlock<T>* m, const T* x, i64 stride, const i64* slots, const i64* read_columns,
                         const KdaPools<T>* pools, i64 n_rows, i64 group, T* y) {
  const i64 tokens = n_rows * group, inner = m->heads * m->dim, entered = m->entry.outputs, factor = m->decay_up.inputs;
  Arena arena(1);
  arena.reserve<T>(aligned<T>(tokens * entered) + 3 * aligned<T>(tokens * inner));
  T *all = arena.take<T>(tokens * entered), *raw = arena.take<T>(tokens * inner), *gate = arena.take<T>(tokens * inner);
  T* o = arena.take<T>(tokens * inner);
  multiply(x, stride, m->entry, all, entered, tokens);
  T *low = all + 3 * inner, *decay = low + m->gate_width, *beta = decay + factor;
  multiply(decay, entered, m->decay_up, raw, inner, tokens);
  if (m->gate_up.data) multiply(low, entered, m->gate_up, gate, inner, tokens);
  k3_kda_group(all, entered, raw, inner, beta, entered, m->taps, m->bias, m->decay, m->bound, m->eps, slots, read_columns, pools, o,
               n_rows, group, m->heads, m->dim, m->conv);
  for (i64 t = 0; t < tokens; ++t)
    for (i64 h = 0; h < m->heads; ++h) {
      const T* own = (m->gate_up.data ? gate + t * inner : low + t * entered) + h * m->dim;
      T* row = o + t * inner + h * m->dim;
      gated_rms_norm(row, own, m->norm, row, m->dim, T(m->norm_eps));
    }
  multiply(o, inner, m->out, y, m->out.outputs, tokens);
}
K3_BOTH(k3_kda_block,
        (const KdaBlock<T>* m, const T* x, i64 stride, const i64* slots, const i64* read_columns, const KdaPools<T>* pools, i64 n_rows,
         i64 group, T* y),
        (m, x, stride, slots, read_columns, pools, n_rows, group, y))
