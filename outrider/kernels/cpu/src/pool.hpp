// A small fork-join pool. A job is n units of work. Every thread that is awake claims ranges of them, and the job is done when
// every *claimed* range is done. A worker that the operating system keeps off its core has claimed nothing and delays no thread.
#pragma once
#include <cstdint>

namespace outrider {

using Work = void (*)(void* context, int64_t begin, int64_t end);

void parallel(Work work, void* context, int64_t units, int threads);  // threads: at most this many; 1 runs here
int pool_threads();
void set_pool_threads(int threads);
void set_pool_cores(const int32_t* cores, int64_t count);  // cores for threads started from now on; 0: those of the calling thread

// Between phases of one forward the workers stay awake; outside they fall asleep after some tens of microseconds.
struct Hot {
    Hot();
    ~Hot();
};

}  // namespace outrider
