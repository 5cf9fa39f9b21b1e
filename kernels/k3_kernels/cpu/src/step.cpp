// What surrounds the model in a verify step: its tables from the row table, and the judgement of greedy groups. Rules:
// k3_kernels.reference.tables.verify_tables, k3.acceptance.accept, decode_svc.rank.rows.RowTable.commit.
#include <algorithm>

#include "best.h"

// rows: of the table, 0 nobody's. pages: [n, width] of page_tokens on each of cp ranks, -1 where there is none. Per token:
// tokens, slot (-1: kept elsewhere), bound, next; per row: row_base, row_column, row_len.
K3_EXPORT void k3_derive(const i64* rows, const i64* limits, const i64* base, const i64* anchor, const i64* draft_len,
                         const i64* column, const i64* drafts, i64 drafts_stride, const std::int32_t* pages, i64 pages_stride,
                         i64 width, i64 page_tokens, i64 cp, i64 cp_rank, i64* tokens, i64* slot, std::int32_t* bound, i64* next,
                         i64* row_base, i64* row_column, i64* row_len, i64 n, i64 group) {
  const i64 block = page_tokens * cp;
  for (i64 b = 0; b < n; ++b, pages += pages_stride) {
    const i64 row = rows[b], length = std::min(draft_len[row], limits[b]);
    row_base[b] = base[row], row_column[b] = column[row], row_len[b] = length;
    for (i64 g = 0; g < group; ++g, ++tokens, ++slot, ++bound, ++next) {
      const i64 position = base[row] + g, offset = position % block, end = position + 1;
      const i64 page = position / block < width ? pages[position / block] : -1;
      const bool is_real = g <= length && row != 0;
      const i64 rest = std::clamp<i64>(end % block - cp_rank * page_tokens, 0, page_tokens);
      *tokens = g == 0 ? anchor[row] : drafts[row * drafts_stride + g - 1];
      *slot = is_real && page >= 0 && offset / page_tokens == cp_rank ? page * page_tokens + offset % page_tokens : -1;
      *bound = is_real ? static_cast<std::int32_t>(rest + end / block * page_tokens) : 0;
      *next = end;
    }
  }
}

// logits: [n * group, vocabulary]. drafts: [n, group - 1] at the stride. drawn: [n, group + 1], the best tokens and how
// many drafts equal them from the first on; the rows of the table go on behind those.
template <typename T>
static void k3_judge(const T* logits, const i64* drafts, i64 drafts_stride, const i64* draft_len, const i64* rows, const i64* start,
                     i64* base, i64* anchor, i64* column, i64* drawn, i64 n, i64 group, i64 vocabulary) {
  for (i64 b = 0; b < n; ++b, drawn += group + 1) {
    for (i64 g = 0; g < group; ++g, logits += vocabulary) drawn[g] = best(logits, vocabulary);
    i64 accepted = 0;
    while (accepted < group - 1 && accepted < draft_len[b] && drawn[accepted] == drafts[b * drafts_stride + accepted]) ++accepted;
    drawn[group] = accepted;
    const i64 row = rows[b];
    base[row] = row == 0 ? 0 : start[b] + accepted + 1;
    column[row] = accepted;
    anchor[row] = drawn[accepted];
  }
}
K3_BOTH(k3_judge,
        (const T* logits, const i64* drafts, i64 drafts_stride, const i64* draft_len, const i64* rows, const i64* start, i64* base,
         i64* anchor, i64* column, i64* drawn, i64 n, i64 group, i64 vocabulary),
        (logits, drafts, drafts_stride, draft_len, rows, start, base, anchor, column, drawn, n, group, vocabulary))
