// Runs items on the threads of the OpenMP runtime that is already in the process (torch's): this library links none,
// so that two pools never compete. Where none is found, items run on the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// The name of the file that the runtime's entry point comes from, or "" where there is none.
const char* thread_runtime();

// body(context, index) for every index below `count`, each taken by whichever thread is free.
void run_on_threads(int64_t count, int threads, void (*body)(void*, int64_t), void* context);

// Memory of the calling thread that is kept between calls, aligned to 64 bytes.
float* thread_floats(size_t count);

}  // namespace octavo
