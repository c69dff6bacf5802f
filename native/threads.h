// Runs items on the threads of the OpenMP runtime that is already in the process (torch's): this library links none,
// so that two pools never compete. Where none is found, items run on the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo {

// The name of the file that the runtime's entry point comes from, or "" where there is none.
const char* thread_runtime();

// body(context, index) for every index below `count`, each taken by whichever thread is free. What one of them throws,
// on whichever thread, comes out of here once all threads have put down what they held; some items were then not run.
void run_on_threads(int64_t count, int threads, void (*body)(void*, int64_t), void* context);

// One region of the runtime in which body(context) runs once, on the calling thread, while the others stand by for
// its run_on_threads: work is then handed over in a fraction of a microsecond, and a thread that the system has put
// aside is waited for only where it holds an item. Whatever body throws comes out of here.
void with_team(int threads, void (*body)(void*), void* context);

// Memory of the calling thread that is kept between calls, aligned to 64 bytes: what it works with inside a body, or
// what it prepares for the bodies of others.
enum class Use : int { body, prepared };
float* thread_floats(size_t count, Use use = Use::body);

// Bytes of such memory over all threads of the process.
size_t thread_bytes();

// Bind each of `cores.size()` threads of the calling thread's pool, itself included, to one core. False where this
// system cannot, or the pool has not that many threads.
bool pin_threads(const std::vector<int>& cores);

}  // namespace octavo
