// Causal attention of one request's chunk over expanded keys and values: k3_kernels.reference.mla.prefill.
// Keys are taken in blocks that begin at fixed positions, each query meets them in order, and what it does not see is
// weighted zero: from the same keys and values, how a prompt is cut into chunks cannot be seen in the result.
#include <memory>
#include <new>

#include "math.h"

namespace {

constexpr i64 BLOCK = 256;  // keys; their keys and values stay in the second cache while all queries pass
constexpr i64 QUERIES = 12;  // that share what is read of them
#ifdef __AVX512F__
constexpr i64 ROWS = 6, COLUMNS = 4;  // of score vectors held in registers
#else
constexpr i64 ROWS = 2, COLUMNS = 2;
#endif

struct Aligned {
  void operator()(void* p) const { ::operator delete[](p, std::align_val_t(64)); }
};
template <typename T> using Piece = std::unique_ptr<T[], Aligned>;
template <typename T> Piece<T> piece(i64 n) {
  return Piece<T>(static_cast<T*>(::operator new[](n * sizeof(T), std::align_val_t(64))));
}

// One head's block of keys [width, BLOCK] and values [BLOCK, padded], zero beyond `n` keys.
template <typename T> struct Block {
  Block(i64 key_width, i64 value_width)
      : values((value_width + Lanes<T>::n - 1) / Lanes<T>::n * Lanes<T>::n), key(piece<T>(key_width * BLOCK)), value(piece<T>(values * BLOCK)) {}
  i64 values;
  Piece<T> key, value;
};

// scores[r, j] of QUERIES rows and the first `n` keys of a block, n a multiple of COLUMNS vectors.
template <typename T>
void score(const T* const* q, const T* key, i64 width, i64 n, T scale, T* scores) {
  constexpr i64 L = Lanes<T>::n;
  for (i64 at = 0; at < n; at += COLUMNS * L)
    for (i64 row = 0; row < QUERIES; row += ROWS) {
      Vec<T> acc[ROWS][COLUMNS] = {};
      const T* x[ROWS];
      for (i64 r = 0; r < ROWS; ++r) x[r] = q[row + r];
      for (i64 d = 0; d < width; ++d) {
        Vec<T> k[COLUMNS];
        for (i64 c = 0; c < COLUMNS; ++c) k[c] = load(key + d * BLOCK + at + c * L);
        for (i64 r = 0; r < ROWS; ++r)
          for (i64 c = 0; c < COLUMNS; ++c) acc[r][c] += k[c] * x[r][d];
      }
      for (i64 r = 0; r < ROWS; ++r)
        for (i64 c = 0; c < COLUMNS; ++c) store(scores + (row + r) * BLOCK + at + c * L, acc[r][c] * scale);
    }
}

// One row's scores to weights exp(score - peak); returns what earlier sums are multiplied by.
template <typename T> K3_INLINE T weigh(T* scores, i64 n, T& peak, T& total) {
  constexpr i64 L = Lanes<T>::n;
  Vec<T> top = load(scores);
  for (i64 j = L; j < n; j += L) {
    top = largest_of(load(scores + j), top);
  }
  const T highest = largest<T>(top);
  const T next = highest > peak ? highest : peak;
  Vec<T> acc{};
  for (i64 j = 0; j < n; j += L) {
    const Vec<T> p = vexp<T>(load(scores + j) - next);
    acc += p;
    store(scores + j, p);
  }
  const T kept = std::exp(peak - next);
  peak = next;
  total = total * kept + sum<T>(acc);
  return kept;
}

// o[r] = o[r] * kept[r] + sum over j < n of p[r, j] value[j], N vectors wide.
template <typename T, int N>
void gather(const T* p, const T* value, i64 values, i64 n, const T* kept, T* o) {
  constexpr i64 L = Lanes<T>::n;
  constexpr i64 rows = ROWS;
  for (i64 row = 0; row < QUERIES; row += rows) {
    const T* weights = p + row * BLOCK;
    Vec<T> acc[rows][N];
    for (i64 r = 0; r < rows; ++r)
      for (int c = 0; c < N; ++c) acc[r][c] = load(o + (row + r) * values + c * L) * kept[row + r];
    for (i64 j = 0; j < n; ++j) {
      Vec<T> v[N];
      for (int c = 0; c < N; ++c) v[c] = load(value + j * values + c * L);
      for (i64 r = 0; r < rows; ++r)
        for (int c = 0; c < N; ++c) acc[r][c] += v[c] * weights[r * BLOCK + j];
    }
    for (i64 r = 0; r < rows; ++r)
      for (int c = 0; c < N; ++c) store(o + (row + r) * values + c * L, acc[r][c]);
  }
}

}  // namespace

// q: [T, H, N + R], tokens `q_stride` values apart. key: [H, N, S], shared: [R, S], value: [S, H, V] and S = start + T.
// o: [T, H, V].
template <typename T>
static void k3_attend_chunk(const T* q, i64 q_stride, const T* key, const T* shared, const T* value, T* o, i64 start, i64 tokens,
                            i64 heads, i64 nope, i64 rope, i64 value_width, double scale) {
  constexpr i64 L = Lanes<T>::n, step = COLUMNS * L;
  const i64 width = nope + rope, n_keys = start + tokens, tiles = (tokens + QUERIES - 1) / QUERIES;
  Block<T> block(width, value_width);
  const i64 values = block.values;
  const Piece<T> outputs = piece<T>(tiles * QUERIES * values), peaks = piece<T>(tiles * QUERIES), totals = piece<T>(tiles * QUERIES);
  alignas(64) T scores[QUERIES * BLOCK];
  T kept[QUERIES];
  for (i64 h = 0; h < heads; ++h) {
    std::memset(outputs.get(), 0, tiles * QUERIES * values * sizeof(T));
    for (i64 t = 0; t < tiles * QUERIES; ++t) peaks[t] = -std::numeric_limits<T>::infinity(), totals[t] = 0;
    for (i64 lo = 0; lo < n_keys; lo += BLOCK) {
      const i64 held = n_keys - lo < BLOCK ? n_keys - lo : BLOCK;
      for (i64 d = 0; d < width; ++d) {
        const T* from = (d < nope ? key + (h * nope + d) * n_keys : shared + (d - nope) * n_keys) + lo;
        std::memcpy(&block.key[d * BLOCK], from, held * sizeof(T));
        std::memset(&block.key[d * BLOCK + held], 0, (BLOCK - held) * sizeof(T));
      }
      for (i64 j = 0; j < held; ++j) {
        std::memcpy(&block.value[j * values], value + ((lo + j) * heads + h) * value_width, value_width * sizeof(T));
        std::memset(&block.value[j * values + value_width], 0, (values - value_width) * sizeof(T));
      }
      for (i64 tile = lo > start ? (lo - start) / QUERIES : 0; tile < tiles; ++tile) {
        const i64 first = tile * QUERIES;
        const i64 rows = tokens - first < QUERIES ? tokens - first : QUERIES;
        const i64 last_sees = start + first + rows - lo;  // keys of the block that the tile's last query sees
        const i64 used = last_sees < held ? last_sees : held;
        if (used <= 0) continue;
        const T* x[QUERIES];  // rows beyond the chunk repeat its last one
        for (i64 r = 0; r < QUERIES; ++r) x[r] = q + (first + (r < rows ? r : rows - 1)) * q_stride + h * width;
        const i64 n = (used + step - 1) / step * step;
        score<T>(x, block.key.get(), width, n, T(scale), scores);
        for (i64 r = 0; r < QUERIES; ++r) {
          T* row = scores + r * BLOCK;
          const i64 sees = start + first + (r < rows ? r : rows - 1) + 1 - lo;
          for (i64 j = sees > 0 ? sees : 0; j < n; ++j) row[j] = -std::numeric_limits<T>::infinity();
          kept[r] = weigh<T>(row, n, peaks[first + r], totals[first + r]);
        }
        for (i64 c = 0; c < values;) {
          T* at = &outputs[first * values + c];
          const T* v = &block.value[c];
          if (values - c >= 2 * L) gather<T, 2>(scores, v, values, used, kept, at), c += 2 * L;
          else gather<T, 1>(scores, v, values, used, kept, at), c += L;
        }
      }
    }
    for (i64 t = 0; t < tokens; ++t) {
      const T weight = T(1) / totals[t];
      const T* from = &outputs[t * values];
      over<T>(value_width, o + (t * heads + h) * value_width, [&](auto at) { return at(from) * weight; });
    }
  }
}
K3_BOTH(k3_attend_chunk,
        (const T* q, i64 q_stride, const T* key, const T* shared, const T* value, T* o, i64 start, i64 tokens, i64 heads,
         i64 nope, i64 rope, i64 value_width, double scale),
        (q, q_stride, key, shared, value, o, start, tokens, heads, nope, rope, value_width, scale))
