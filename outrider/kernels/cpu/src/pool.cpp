#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace outrider {
namespace {

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

using Clock = std::chrono::steady_clock;
constexpr auto BRIEF = std::chrono::microseconds(40);   // awake after the last job, outside a forward
constexpr auto LONG = std::chrono::microseconds(400);   // inside a forward: longer than any part that runs on one thread

#if defined(__linux__)
cpu_set_t cores;
bool given = false;
#endif

void take_cores() {  // called by a new thread, which starts with the cores of its parent
#if defined(__linux__)
    if (given) pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
#endif
}

struct Pool {
    // One word holds the job's number and the unclaimed units, so a claim by a thread that read the previous job fails. Work and
    // context may be read before the claim: they change only after every unit is done.
    std::atomic<uint64_t> ticket{0};  // job << 32 | unclaimed units
    alignas(64) std::atomic<int64_t> finished{0};
    alignas(64) std::atomic<Work> work{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<int64_t> units{0};
    std::atomic<int> limit{1};  // threads that may take part in this job
    std::atomic<int> hot{0};
    std::atomic<bool> stop{false};
    std::atomic<int> sleepers{0};
    std::mutex sleep;
    std::condition_variable wake;
    std::mutex busy;   // one job at a time; a second caller works alone
    std::mutex admin;  // starting and stopping threads
    std::vector<std::thread> workers;
    int threads = 1;

    void take_part() {
        for (;;) {
            uint64_t t = ticket.load(std::memory_order_acquire);
            int64_t left = static_cast<uint32_t>(t);
            if (left == 0) return;
            Work w = work.load(std::memory_order_relaxed);
            void* c = context.load(std::memory_order_relaxed);
            int64_t n = units.load(std::memory_order_relaxed);
            // guided: large ranges first (long streams), single units last (even finish)
            int64_t take = left / (3 * limit.load(std::memory_order_relaxed));
            if (take < 1) take = 1;
            if (!ticket.compare_exchange_weak(t, t - static_cast<uint64_t>(take), std::memory_order_acq_rel)) continue;
            w(c, n - left, n - left + take);
            finished.fetch_add(take, std::memory_order_release);
        }
    }

    void worker(int index) {
        take_cores();
        auto since = Clock::now();
        uint64_t seen = 0;
        int spins = 0;
        while (!stop.load(std::memory_order_relaxed)) {
            uint64_t t = ticket.load(std::memory_order_acquire);
            if (static_cast<uint32_t>(t) != 0 && index < limit.load(std::memory_order_relaxed)) {
                take_part();
                since = Clock::now();
                seen = ticket.load(std::memory_order_relaxed) >> 32;
                spins = 0;
                continue;
            }
            if (t >> 32 != seen) {  // a job ended without this thread: still a sign of activity
                seen = t >> 32;
                since = Clock::now();
            }
            pause();
            if (++spins < 64) continue;
            spins = 0;
            auto patience = hot.load(std::memory_order_relaxed) > 0 ? LONG : BRIEF;
            if (Clock::now() - since < patience) continue;
            std::unique_lock<std::mutex> lock(sleep);
            sleepers.fetch_add(1, std::memory_order_seq_cst);
            wake.wait(lock, [&] {
                return stop.load() || (static_cast<uint32_t>(ticket.load(std::memory_order_seq_cst)) != 0 &&
                                       index < limit.load(std::memory_order_relaxed));
            });
            sleepers.fetch_sub(1, std::memory_order_seq_cst);
            since = Clock::now();
        }
    }

    void start() {
        std::lock_guard<std::mutex> guard(admin);
        stop = false;
        while (static_cast<int>(workers.size()) < threads - 1) {
            int index = static_cast<int>(workers.size()) + 1;
            workers.emplace_back([this, index] { worker(index); });
        }
    }

    void halt() {
        std::lock_guard<std::mutex> guard(admin);
        {
            std::lock_guard<std::mutex> lock(sleep);
            stop = true;
        }
        wake.notify_all();
        for (auto& w : workers) w.join();
        workers.clear();
    }

    void run(Work w, void* c, int64_t n, int count) {
        if (static_cast<int>(workers.size()) < threads - 1) start();
        limit.store(count, std::memory_order_relaxed);
        work.store(w, std::memory_order_relaxed);
        context.store(c, std::memory_order_relaxed);
        units.store(n, std::memory_order_relaxed);
        finished.store(0, std::memory_order_relaxed);
        uint64_t job = (ticket.load(std::memory_order_relaxed) >> 32) + 1;
        ticket.store(job << 32 | static_cast<uint64_t>(n), std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(sleep); }  // a worker between its check and its wait would miss the call
            wake.notify_all();
        }
        take_part();
        // All units are claimed; wait for those of other threads. If that takes long, yield the core: the thread that this one
        // waits for may need it.
        int spins = 0;
        while (finished.load(std::memory_order_acquire) != n) {
            pause();
            if (++spins > 4000) std::this_thread::yield();
        }
    }
};

// Never destroyed: workers may still be asleep in it when the process ends.
alignas(64) unsigned char storage[sizeof(Pool)];
Pool* pool = nullptr;
std::once_flag once;

void after_fork_in_child() {  // the threads are gone and the locks may be held: begin again with the same number
    int threads = pool->threads;
    pool = new (storage) Pool();
    pool->threads = threads;
}

Pool& instance() {
    std::call_once(once, [] {
        pool = new (storage) Pool();
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, after_fork_in_child);
#endif
    });
    return *pool;
}

}  // namespace

void parallel(Work work, void* context, int64_t units, int threads) {
    if (units <= 0) return;
    Pool& p = instance();
    if (threads > p.threads) threads = p.threads;
    if (threads > units) threads = static_cast<int>(units);
    if (threads <= 1 || units >= (int64_t(1) << 32) || !p.busy.try_lock()) {
        work(context, 0, units);
        return;
    }
    p.run(work, context, units, threads);
    p.busy.unlock();
}

int pool_threads() { return instance().threads; }

void set_pool_threads(int threads) {
    Pool& p = instance();
    std::lock_guard<std::mutex> guard(p.busy);
    if (threads < 1) threads = 1;
    if (threads == p.threads) return;
    if (threads < p.threads) p.halt();
    p.threads = threads;
}

void set_pool_cores(const int32_t* which, int64_t count) {
#if defined(__linux__)
    given = count > 0;
    CPU_ZERO(&cores);
    for (int64_t i = 0; i < count; i++)
        if (which[i] < CPU_SETSIZE) CPU_SET(static_cast<size_t>(which[i]), &cores);
#else
    (void)which, (void)count;
#endif
}

Hot::Hot() { instance().hot.fetch_add(1, std::memory_order_relaxed); }
Hot::~Hot() { instance().hot.fetch_sub(1, std::memory_order_relaxed); }

}  // namespace outrider
