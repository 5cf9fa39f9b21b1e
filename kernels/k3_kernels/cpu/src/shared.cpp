// Collectives of ranks on one machine over a shared memory segment.
//
// Every rank has a slot in each of two halves of the segment. A round: write own slot, arrive, wait for all, read. The
// next round uses the other half, and whoever arrives in it has read everything of the round before: one wait per round.
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "abi.h"

namespace {

struct alignas(64) Rank {
  std::atomic<i64> arrived;  // last round it arrived in; rounds start at 1
  std::atomic<i64> pid;
};

struct alignas(64) Segment {  // as created: zeros
  std::atomic<std::uint32_t> bell;  // rings at every arrival
  std::atomic<std::uint32_t> n_asleep;
  Rank ranks[];
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<i64>::is_always_lock_free);

constexpr double NAP_S = 0.1;  // between two looks at whether the others live

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

double now_s() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

struct Group {
  Segment* segment;
  i64 rank, size, capacity;

  char* slot(i64 round, i64 of) const {
    const i64 head = (i64(sizeof(Segment)) + size * i64(sizeof(Rank)) + 4095) / 4096 * 4096;
    return reinterpret_cast<char*>(segment) + head + ((round & 1) * size + of) * capacity;
  }

  i64 missing(i64 round) const {
    for (i64 r = 0; r < size; ++r)
      if (segment->ranks[r].arrived.load(std::memory_order_acquire) < round) return r;
    return -1;
  }

  void arrive(i64 round) const {
    segment->ranks[rank].arrived.store(round);
    segment->bell.fetch_add(1);
    if (segment->n_asleep.load()) syscall(SYS_futex, &segment->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // -1 when all have arrived, else one that did not: in time, or because its process is gone.
  i64 wait(i64 round, double spin_s, double deadline_s) const {
    const double begun = now_s();
    for (int i = 0;; ++i) {
      if (missing(round) < 0) return -1;
      if ((i & 15) == 15) {
        if (now_s() - begun >= spin_s) break;
      }
      relax();
    }
    for (;;) {
      segment->n_asleep.fetch_add(1);
      const std::uint32_t heard = segment->bell.load();
      i64 late = missing(round);
      if (late >= 0) {
        const timespec nap{0, long(NAP_S * 1e9)};
        syscall(SYS_futex, &segment->bell, FUTEX_WAIT, heard, &nap, nullptr, 0);
      }
      segment->n_asleep.fetch_sub(1);
      late = missing(round);
      if (late < 0) return -1;
      const double waited = now_s() - begun;
      const i64 pid = segment->ranks[late].pid.load();
      if (waited >= deadline_s || (pid && kill(pid_t(pid), 0) && errno == ESRCH)) return missing(round);
    }
  }
};

}  // namespace

K3_EXPORT void k3_shared_enter(void* segment, i64 rank) {
  static_cast<Segment*>(segment)->ranks[rank].pid.store(getpid());
}

// Piece j of `to` pieces goes to rank j; with one piece, to all. Pieces of ranks first .. first + from - 1 come back.
K3_EXPORT void k3_shared_exchange(void* segment, i64 rank, i64 size, i64 capacity, i64 round, const char* sent, i64 to,
                                  i64 piece, i64 first, i64 from, char* received, double spin_s, double deadline_s,
                                  i64* lost) {
  const Group group{static_cast<Segment*>(segment), rank, size, capacity};
  const i64 most = capacity / size;  // of one piece in a round, the same for every rank
  *lost = -1;
  for (i64 at = 0; at < piece || at == 0; at += most, ++round) {
    const i64 n = piece - at < most ? piece - at : most;
    for (i64 j = 0; j < to; ++j) std::memcpy(group.slot(round, rank) + j * n, sent + j * piece + at, n);
    group.arrive(round);
    *lost = group.wait(round, spin_s, deadline_s);
    if (*lost >= 0) return;
    for (i64 r = 0; r < from; ++r)
      std::memcpy(received + r * piece + at, group.slot(round, first + r) + (to > 1 ? rank * n : 0), n);
  }
}

// The sum is taken in rank order, so that all ranks have the same bits.
template <typename T>
static void k3_shared_sum(void* segment, i64 rank, i64 size, i64 capacity, i64 round, T* values, i64 count, double spin_s,
                          double deadline_s, i64* lost) {
  const Group group{static_cast<Segment*>(segment), rank, size, capacity};
  const i64 most = capacity / i64(sizeof(T));
  *lost = -1;
  for (i64 at = 0; at < count; at += most, ++round) {
    const i64 n = count - at < most ? count - at : most;
    std::memcpy(group.slot(round, rank), values + at, n * sizeof(T));
    group.arrive(round);
    *lost = group.wait(round, spin_s, deadline_s);
    if (*lost >= 0) return;
    std::memcpy(values + at, group.slot(round, 0), n * sizeof(T));
    for (i64 r = 1; r < size; ++r) {
      const T* other = reinterpret_cast<const T*>(group.slot(round, r));
      for (i64 i = 0; i < n; ++i) values[at + i] += other[i];
    }
  }
}
K3_BOTH(k3_shared_sum, (void* segment, i64 rank, i64 size, i64 capacity, i64 round, T* values, i64 count, double spin_s,
                        double deadline_s, i64* lost),
        (segment, rank, size, capacity, round, values, count, spin_s, deadline_s, lost))
