// Absorbed attention of verify groups over a paged latent cache: k3_kernels.reference.mla.decode and write.
// Keys come in blocks that stay in the cache closest to the core while all queries of a row meet them. A query's blocks
// begin at key 0, so its result depends on nothing but its own keys. Keys beyond a bound are neither weighed nor added.
#include "arena.h"
#include "attend.h"
#include "gemm.h"

// Strides in values. table: [rows, >= pages of the largest bound]. bound: [rows * group]. o: [tokens, H, value_width].
template <typename T>
static void k3_mla_decode(const T* q, i64 token_stride, i64 head_stride, const T* cache, i64 page_stride, i64 key_stride,
                          const std::int32_t* table, i64 table_stride, const std::int32_t* bound, T* o, T* lse, i64 rows,
                          i64 group, i64 heads, i64 width, i64 value_width, i64 page_tokens, double scale) {
  const i64 queries = group * heads;
  Arena arena;
  arena.reserve<Running<T>>(queries);
  Running<T>* running = arena.take<Running<T>>(queries);
  const T* keys[BLOCK];
  for (i64 b = 0; b < rows; ++b, table += table_stride, bound += group, o += queries * value_width, lse += queries) {
    i64 longest = 0;
    for (i64 g = 0; g < group; ++g) longest = bound[g] > longest ? bound[g] : longest;
    std::memset(static_cast<void*>(o), 0, queries * value_width * sizeof(T));
    for (i64 i = 0; i < queries; ++i) running[i] = Running<T>{};
    for (i64 from = 0; from < longest; from += BLOCK) {
      for (i64 j = 0; j < BLOCK; ++j) {
        const i64 key = from + j < longest ? from + j : longest - 1;
        const i64 page = table[key / page_tokens] > 0 ? table[key / page_tokens] : 0;
        keys[j] = cache + page * page_stride + key % page_tokens * key_stride;
      }
      for (i64 g = 0; g < group; ++g) {
        const i64 n_keys = bound[g] - from < BLOCK ? bound[g] - from : BLOCK;
        if (n_keys <= 0) continue;
        for (i64 h = 0; h < heads; ++h)
          meet<T>(q + (b * group + g) * token_stride + h * head_stride, keys, n_keys, width, value_width, T(scale),
                  running[g * heads + h], o + (g * heads + h) * value_width);
      }
    }
    for (i64 i = 0; i < queries; ++i) {
      finish(running[i], o + i * value_width, value_width);
      lse[i] = running[i].peak + std::log(running[i].total);
    }
  }
}
K3_BOTH(k3_mla_decode,
        (const T* q, i64 token_stride, i64 head_stride, const T* cache, i64 page_stride, i64 key_stride, const std::int32_t* table,
         i64 table_stride, const std::int32_t* bound, T* o, T* lse, i64 rows, i64 group, i64 heads, i64 width, i64 value_width,
         i64 page_tokens, double scale),
        (q, token_stride, head_stride, cache, page_stride, key_stride, table, table_stride, bound, o, lse, rows, group, heads, width,
         value_width, page_tokens, scale))

// Latent rows to their slots, page * page_tokens + offset; -1 is skipped.
template <typename T>
static void k3_mla_write(T* cache, i64 page_stride, i64 key_stride, const i64* slot, i64 page_tokens, const T* latent, i64 stride,
                         i64 tokens, i64 width) {
  for (i64 t = 0; t < tokens; ++t, latent += stride)
    if (slot[t] >= 0)
      std::memcpy(cache + slot[t] / page_tokens * page_stride + slot[t] % page_tokens * key_stride, latent, width * sizeof(T));
}
K3_BOTH(k3_mla_write,
        (T* cache, i64 page_stride, i64 key_stride, const i64* slot, i64 page_tokens, const T* latent, i64 stride, i64 tokens, i64 width),
        (cache, page_stride, key_stride, slot, page_tokens, latent, stride, tokens, width))

// A whole layer for verify groups on a rank that holds all pages, from its normalised input to its output projection:
// blocks.MlaBlock. entry gives latent and shared key, query (or, with query_up, its low-rank factor), output gate.
// key_up: [H, N, C]; value_up: [H, V, C], both at head_stride.
template <typename T> struct MlaBlock {
  Matrix<T> entry, query_up, out;
  const T *latent_norm, *query_norm, *key_up, *value_up;
  i64 heads, nope, rope, rank, value_dim, query_width, has_gate, head_stride;
  double scale, eps;
};

template <typename T>
static void k3_mla_block(const MlaBlock<T>* m, const T* x, i64 stride, T* cache, i64 page_stride, i64 key_stride, const i64* slot,
                         const std::int32_t* table, i64 table_stride, const std::int32_t* bound, i64 page_tokens, i64 rows, i64 group,
                         T* y) {
  const i64 tokens = rows * group, entered = m->entry.outputs, width = m->rank + m->rope, head = m->nope + m->rope;
  const i64 n_values = m->heads * m->value_dim;
  Arena arena(1);
  arena.reserve<T>(aligned<T>(tokens * entered) + aligned<T>(tokens * m->heads * head) + aligned<T>(tokens * m->heads * width) +
                   aligned<T>(tokens * m->heads * m->rank) + aligned<T>(tokens * m->heads) + aligned<T>(tokens * n_values));
  T *all = arena.take<T>(tokens * entered), *query = arena.take<T>(tokens * m->heads * head);
  T *absorbed = arena.take<T>(tokens * m->heads * width), *o = arena.take<T>(tokens * m->heads * m->rank);
  T *lse = arena.take<T>(tokens * m->heads), *values = arena.take<T>(tokens * n_values);
  multiply(x, stride, m->entry, all, entered, tokens);
  for (i64 t = 0; t < tokens; ++t) {
    T* row = all + t * entered;
    rms_norm(row, m->latent_norm, row, m->rank, T(m->eps));
    if (m->query_up.data) rms_norm(row + width, m->query_norm, row + width, m->query_width, T(m->eps));
  }
  k3_mla_write(cache, page_stride, key_stride, slot, page_tokens, all, entered, tokens, width);
  if (m->query_up.data) multiply(all + width, entered, m->query_up, query, m->heads * head, tokens);
  for (i64 t = 0; t < tokens; ++t)
    for (i64 h = 0; h < m->heads; ++h) {
      const T* q = (m->query_up.data ? query + t * m->heads * head : all + t * entered + width) + h * head;
      T* to = absorbed + (t * m->heads + h) * width;
      const T* up = m->key_up + h * m->head_stride;
      absorb(q, up, m->nope, m->rank, to);
      std::memcpy(to + m->rank, q + m->nope, m->rope * sizeof(T));
    }
  k3_mla_decode(absorbed, m->heads * width, width, cache, page_stride, key_stride, table, table_stride, bound, o, lse, rows, group,
                m->heads, width, m->rank, page_tokens, m->scale);
  for (i64 t = 0; t < tokens; ++t) {
    for (i64 h = 0; h < m->heads; ++h)
      expand(o + (t * m->heads + h) * m->rank, m->value_up + h * m->head_stride, m->value_dim, m->rank,
             values + t * n_values + h * m->value_dim);
    if (m->has_gate) {
      const T* gate = all + t * entered + width + m->query_width;
      T* own = values + t * n_values;
      over<T>(n_values, own, [&](auto at) { return at(own) * vsigmoid<T>(at(gate)); });
    }
  }
  multiply(values, n_values, m->out, y, m->out.outputs, tokens);
}
K3_BOTH(k3_mla_block,
        (const MlaBlock<T>* m, const T* x, i64 stride, T* cache, i64 page_stride, i64 key_stride, const i64* slot,
         const std::int32_t* table, i64 table_stride, const std::int32_t* bound, i64 page_tokens, i64 rows, i64 group, T* y),
        (m, x, stride, cache, page_stride, key_stride, slot, table, table_stride, bound, page_tokens, rows, group, y))
