// The state of the one launch that runs, and what the checks are told. Internal to runtime/.
#pragma once
#define CUDABENCH_RUNTIME
#include "cudabench.h"
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CUDABENCH_ASAN 1
#endif

#pragma GCC visibility push(hidden)
namespace cudabench {

enum class Status : uint8_t { ready, barrier, warp, done };
enum class WarpOp : uint8_t { sync, shuffle, ballot, reduce, match, mma, ldmatrix };

// A cp.async that was issued and not yet waited for.
struct Copy {
    const char *where;
    char *to;
    const char *from;
    int bytes, source_bytes;
    bool landed; // at once, though nobody may rely on it
};

struct Fiber : Thread {
    void *stack_pointer;
    char *stack;
    void *asan_stack;
    Status status;
    const char *where; // of the operation it waits in
    // the warp operation it waits in, and what it brought
    WarpOp op;
    unsigned mask;
    uint64_t value;
    int detail;
    const void *source_a, *source_b, *source_c;
    void *result;
    // cp.async: groups committed, oldest first, and copies of the group still open
    std::vector<std::vector<Copy>> groups;
    std::vector<Copy> open;
    // vector clock over the lanes of its warp, moved by __syncwarp: for the race checks
    uint32_t clock[32];
    uint32_t rendezvous; // counts operations in which lanes meet: for the traffic counts
};

struct State {
    std::vector<Fiber> fibers;
    std::vector<int> ready;
    Fiber scheduler;
    int threads, done, at_barrier;
    uint32_t epoch; // counts barriers, over all blocks
    int vote[3];
    char *shared; // dynamic shared memory of the block
    const Launch *launch;
    uint64_t random;
    std::string error;
    Body body;
    void *kernel;
    void **arguments;
    uint64_t switches;
    uint64_t block_number;
};
extern State state;
inline Fiber *fiber() { return static_cast<Fiber *>(current); }

uint64_t next_random();
void wait_here();          // back to the scheduler, until somebody makes this fiber ready
void wake(Fiber &fiber);
void fault_text(const char *where, const std::string &what) __attribute__((noreturn));

constexpr size_t stack_bytes = 1 << 18;
// Dynamic shared memory lies inside this array, away from its ends, so that an address a little off is known for what it
// was meant to be, and so that any shared address is within 2 GiB of it.
constexpr size_t shared_margin = 1 << 16, shared_most = 228 << 10;
extern char shared_area[2 * shared_margin + shared_most];
extern "C" char __start_cudabench_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cudabench_shared[] __attribute__((weak, visibility("hidden")));

#ifdef CUDABENCH_CHECKED
void check_launch();
void check_block();
void check_end_of_block();
void check_access(const void *pointer, int bytes, bool write, const char *where);
void check_atomic(const void *pointer, int bytes, const void *pc);
void check_warp_sync(Fiber *warp, unsigned mask);
void check_async(const Copy &copy, bool landing);
#else
inline void check_launch() {}
inline void check_block() {}
inline void check_end_of_block() {}
inline void check_access(const void *, int, bool, const char *) {}
inline void check_atomic(const void *, int, const void *) {}
inline void check_warp_sync(Fiber *, unsigned) {}
inline void check_async(const Copy &, bool) {}
#endif

} // namespace cudabench
#pragma GCC visibility pop
