// A pool whose helpers are welcome but never needed.
//
// The caller offers a job and works on it itself; helpers that are awake take ranges off the same counter. When the counter
// is used up, the caller waits only for helpers that are inside a range. So a helper that the operating system has put aside
// (a busy neighbour, a sleeping core) costs its help and nothing else, where a fork-join pool would stand still. Helpers spin
// for some microseconds, the distance between two operations of a step, and then sleep; waking one is one system call.
//
// Helpers keep off the CPU that the caller runs on. Without that Linux, when no CPU is idle, likes to wake a helper on the CPU
// of the caller, and the two then take turns there for good: two threads were slower than one beside a busy neighbour.
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace sagc {
namespace {

constexpr int kMaxWorkers = 256;
constexpr auto kSpinTime = std::chrono::microseconds(60);
constexpr int kSpinsPerLookAtTheClock = 64;
constexpr int kSpinsBeforeYield = 2000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // Whether the job was run; false when another caller has the pool.
  bool run(int workers, int64_t items, int64_t grain, void (*f)(void*, int, int64_t, int64_t), void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) return false;
    start_helpers(workers - 1);
    keep_helpers_off_this_cpu();
    f_ = f, context_ = context, items_ = items, grain_ = grain, workers_ = workers;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t job = ++num_jobs_;
    // Sequentially consistent, as are all accesses that decide who sees whom: `open_`, `num_inside_`, `is_asleep`.
    open_.store(job);
    for (int i = 0; i < workers - 1; i++) helpers_[i]->wake();
    work(0);
    open_.store(0);
    for (int spins = 0; num_inside_.load() != 0; spins++) spins < kSpinsBeforeYield ? relax() : (void)sched_yield();
    busy_.store(false, std::memory_order_release);
    return true;
  }

 private:
  struct Helper {
    std::atomic<bool> is_asleep{false};
    std::mutex mutex;
    std::condition_variable woken;
    pthread_t thread{};

    void wake() {
      if (!is_asleep.load() || !is_asleep.exchange(false)) return;
      std::lock_guard<std::mutex> lock(mutex);
      woken.notify_one();
    }
  };

  void start_helpers(int count) {
    for (; num_helpers_ < count; num_helpers_++) {
      helpers_[num_helpers_].reset(new Helper());
      std::thread thread([this, index = num_helpers_] { help(index); });
      helpers_[num_helpers_]->thread = thread.native_handle();
      thread.detach();
      avoided_cpu_ = -1;
    }
  }

  // System calls only when the caller has moved since the last job, which is rare. Helpers get the CPUs that the caller may
  // use, so a process confined later (taskset) takes them along; when there is but one, or the system refuses, all stays.
  void keep_helpers_off_this_cpu() {
#if defined(__linux__)
    const int cpu = sched_getcpu();
    if (cpu < 0 || cpu == avoided_cpu_) return;
    avoided_cpu_ = cpu;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    if (CPU_COUNT(&allowed) > 1) CPU_CLR(cpu, &allowed);
    for (int i = 0; i < num_helpers_; i++) pthread_setaffinity_np(helpers_[i]->thread, sizeof allowed, &allowed);
#endif
  }

  // Ranges get smaller towards the end, so that nobody is left with much when the counter is used up.
  void work(int worker) {
    for (int64_t begin = next_.load(std::memory_order_relaxed); begin < items_;) {
      const int64_t share = (items_ - begin) / (2 * workers_), size = share > grain_ ? share : grain_;
      const int64_t end = items_ - begin < size + grain_ ? items_ : begin + size;
      if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      f_(context_, worker, begin, end);
      begin = next_.load(std::memory_order_relaxed);
    }
  }

  void help(int index) {
    uint64_t seen = 0;
    for (;;) {
      seen = wait_for_job(*helpers_[index], seen);
      // Inside is announced before `open_` is read again, and the caller closes before it reads who is inside: one of the two
      // sees the other, so the job's fields never change under a helper.
      num_inside_.fetch_add(1);
      if (open_.load() != 0 && index + 1 < workers_) work(index + 1);
      num_inside_.fetch_sub(1);
    }
  }

  // The number of a job that is open and not the one seen last.
  uint64_t wait_for_job(Helper& helper, uint64_t seen) {
    auto find = [&] {
      const uint64_t job = open_.load();
      return job == seen ? 0 : job;
    };
    for (;;) {
      const auto until = std::chrono::steady_clock::now() + kSpinTime;
      do
        for (int i = 0; i < kSpinsPerLookAtTheClock; i++) {
          if (const uint64_t job = find()) return job;
          relax();
        }
      while (std::chrono::steady_clock::now() < until);
      std::unique_lock<std::mutex> lock(helper.mutex);
      helper.is_asleep.store(true);
      if (find() != 0)
        helper.is_asleep.store(false);
      else
        helper.woken.wait(lock, [&] { return !helper.is_asleep.load(); });
    }
  }

  // The job; written while it is closed and nobody is inside.
  void (*f_)(void*, int, int64_t, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t items_ = 0, grain_ = 1;
  int workers_ = 1;

  uint64_t num_jobs_ = 0;
  int num_helpers_ = 0;
  int avoided_cpu_ = -1;
  std::unique_ptr<Helper> helpers_[kMaxWorkers];
  std::atomic<bool> busy_{false};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> open_{0};  // the job's number, 0: closed
  alignas(64) std::atomic<int> num_inside_{0};
};

// Never destroyed: helpers outlive main(). A forked child has none of them and makes a pool of its own.
std::atomic<Pool*> the_pool{nullptr};

Pool& pool() {
  Pool* current = the_pool.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  static const int registered = pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });
  (void)registered;
  Pool* made = new Pool();
  if (the_pool.compare_exchange_strong(current, made)) return *made;
  delete made;
  return *current;
}

}  // namespace

int num_workers() {
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  return threads < kMaxWorkers ? threads : kMaxWorkers;
}

void parallel_for(int64_t items, int64_t grain, void (*f)(void*, int, int64_t, int64_t), void* context) {
  const int64_t pieces = (items + grain - 1) / grain;
  const int workers = static_cast<int>(num_workers() < pieces ? num_workers() : pieces);
  if (workers <= 1 || !pool().run(workers, items, grain, f, context)) f(context, 0, 0, items);
}

}  // namespace sagc
