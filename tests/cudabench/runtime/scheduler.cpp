// One fiber per CUDA thread, one block after another, all on one operating-system thread: barriers and warp operations
// are places where a fiber waits, and the order in which waiting fibers go on is ours to choose.
#include "runtime.h"
#include <algorithm>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#ifdef CUDABENCH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cudabench {

Thread *current;
uint3 block_index;
dim3 block_dim, grid_dim;
State state;
alignas(1024) char shared_area[2 * shared_margin + shared_most];

extern "C" __attribute__((visibility("hidden"))) void cudabench_switch(void **save, void *load);
#ifndef __x86_64__
#error "the fiber switch is written for x86-64"
#endif
// Callee-saved registers of the System V ABI; everything else is dead across a call.
asm(R"(.text
.type cudabench_switch,@function
.hidden cudabench_switch
.globl cudabench_switch
cudabench_switch:
 pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
 movq %rsp,(%rdi); movq %rsi,%rsp
 popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret
.size cudabench_switch,.-cudabench_switch)");

#ifdef CUDABENCH_ASAN
static const void *scheduler_bottom;
static size_t scheduler_bytes;
#endif

static __attribute__((noinline)) void jump(Fiber *from, Fiber *to, bool last = false) {
    state.switches++;
#ifdef CUDABENCH_ASAN
    const bool home = to == &state.scheduler;
    __sanitizer_start_switch_fiber(last ? nullptr : &from->asan_stack, home ? scheduler_bottom : to->stack,
                                   home ? scheduler_bytes : stack_bytes);
#endif
    (void)last;
    current = to;
    cudabench_switch(&from->stack_pointer, to->stack_pointer);
#ifdef CUDABENCH_ASAN
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(from->asan_stack, &bottom, &bytes);
#endif
}

uint64_t next_random() { // xorshift64
    uint64_t &r = state.random;
    r ^= r << 13, r ^= r >> 7, r ^= r << 17;
    return r;
}

void fault_text(const char *where, const std::string &what) { // abandons the launch; the fibers stay as they are
    const uint3 t = current->index;
    char place[160];
    snprintf(place, sizeof place, "%s: block (%u,%u,%u) thread (%u,%u,%u): ", where, block_index.x, block_index.y,
             block_index.z, t.x, t.y, t.z);
    if (state.error.empty()) state.error = place + what;
    jump(fiber(), &state.scheduler, true);
    abort();
}
void fault(const char *where, const char *what) { fault_text(where, what); }

void wait_here() { jump(fiber(), &state.scheduler); }
void wake(Fiber &f) {
    f.status = Status::ready;
    state.ready.push_back(f.id);
}

static void release_barrier() {
    state.at_barrier = 0, state.epoch++;
    for (int i = 0; i < state.threads; i++) {
        Fiber &f = state.fibers[i];
        if (f.status != Status::barrier) continue;
        f.value = state.vote[f.detail];
        wake(f);
    }
}

int barrier_vote(const char *where, int operation, int value) {
    Fiber *me = fiber();
    me->where = where, me->status = Status::barrier, me->detail = operation, me->rendezvous++;
    if (state.at_barrier++ == 0) state.vote[0] = 0, state.vote[1] = 1, state.vote[2] = 0;
    state.vote[0] += value != 0, state.vote[1] &= value != 0, state.vote[2] |= value != 0;
    if (state.at_barrier == state.threads - state.done) { // threads that have returned are not waited for
        for (int i = 0; i < state.threads; i++) {
            const Fiber &other = state.fibers[i];
            if (other.status == Status::barrier && other.where != where && strcmp(other.where, where))
                fault_text(where, std::string("divergent __syncthreads: other threads wait at ") + other.where);
        }
        release_barrier();
    }
    wait_here();
    return (int)me->value;
}
void barrier(const char *where) { barrier_vote(where, 0, 0); }

void *dynamic_shared() { return state.shared; }

static void entry() {
#ifdef CUDABENCH_ASAN
    const void *bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (!scheduler_bottom) scheduler_bottom = bottom, scheduler_bytes = bytes;
#endif
    state.body(state.kernel, state.arguments);
    Fiber *me = fiber();
    me->groups.clear(), me->open.clear(); // copies nobody waited for: their data never arrive
    me->status = Status::done, me->where = "returned", state.done++;
    if (state.at_barrier && state.at_barrier == state.threads - state.done) release_barrier();
    jump(me, &state.scheduler, true);
    abort();
}

#ifndef CUDABENCH_ASAN
// A bad address or a misaligned vector instruction of a kernel ends the launch, not the process: the signal handler
// sends the fiber that caused it to `crashed`, on a fresh part of its own stack.
static const char *crash_text;
static struct sigaction old_actions[2];
static const int crash_signals[2] = {SIGSEGV, SIGBUS};

static void crashed() { fault("memory fault", crash_text); }

static void on_signal(int number, siginfo_t *info, void *context) {
    if (!current || fiber() == &state.scheduler) { // not a kernel's: as if we were not here
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    crash_text = info->si_addr ? "an address that is not mapped, or a stack that overflowed (check=\"race\" says where)"
                               : "a misaligned vector access, or an impossible address (check=\"race\" says where)";
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    registers[REG_RIP] = (greg_t)(void *)crashed;
    registers[REG_RSP] = (greg_t)(fiber()->stack + stack_bytes - 1024 - 8);
}

static void catch_crashes(bool start) {
    static char stack[1 << 16];
    static stack_t old_stack;
    if (!start) {
        for (int i = 0; i < 2; i++) sigaction(crash_signals[i], &old_actions[i], nullptr);
        sigaltstack(&old_stack, nullptr);
        return;
    }
    stack_t mine = {};
    mine.ss_sp = stack, mine.ss_size = sizeof stack;
    sigaltstack(&mine, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 2; i++) sigaction(crash_signals[i], &action, &old_actions[i]);
}
#else
static void catch_crashes(bool) {} // AddressSanitizer reports them
#endif

static void prepare_fibers() {
    const int n = state.threads;
    while ((int)state.fibers.size() < n) {
        // a guard page below each stack: an overflow ends the process instead of corrupting another thread
        char *memory = (char *)mmap(nullptr, stack_bytes + 4096, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        mprotect(memory, 4096, PROT_NONE);
        state.fibers.emplace_back();
        state.fibers.back().stack = memory + 4096;
    }
    for (int i = 0; i < n; i++) {
        Fiber &f = state.fibers[i];
        f.id = i, f.status = Status::ready, f.where = "start", f.asan_stack = nullptr, f.rendezvous = 0;
        f.index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y)};
        f.groups.clear(), f.open.clear();
        for (int lane = 0; lane < 32; lane++) f.clock[lane] = lane == (i & 31);
#ifdef CUDABENCH_ASAN
        __asan_unpoison_memory_region(f.stack, stack_bytes); // frames of the fiber that ended here before
#endif
        void **top = (void **)(f.stack + stack_bytes - 72);
        top[0] = nullptr;
        *--top = (void *)entry;
        top -= 6;
        memset(top, 0, 6 * sizeof(void *));
        f.stack_pointer = top;
        state.ready.push_back(i);
    }
}

static void prepare_shared() { // a value read before it was written is NaN
    if (__start_cudabench_shared != __stop_cudabench_shared)
        memset(__start_cudabench_shared, 0xff, __stop_cudabench_shared - __start_cudabench_shared);
    state.shared = shared_area + shared_margin;
#ifdef CUDABENCH_ASAN
    __asan_unpoison_memory_region(shared_area, sizeof shared_area);
    __asan_poison_memory_region(shared_area, shared_margin);
    __asan_poison_memory_region(state.shared + state.launch->shared_bytes,
                                shared_margin + shared_most - state.launch->shared_bytes);
#endif
    memset(state.shared, 0xff, state.launch->shared_bytes);
}

static std::string deadlock() {
    std::string text = "deadlock:";
    int told = 0;
    for (int i = 0; i < state.threads && told < 4; i++) {
        const Fiber &f = state.fibers[i];
        if (f.status == Status::done) continue;
        const char *kind = f.status == Status::barrier ? " at the barrier of " : " in the warp operation of ";
        text += (told++ ? ", thread " : " thread ") + std::to_string(i) + kind + f.where;
    }
    return text;
}

static void run_block() {
    state.done = state.at_barrier = 0, state.epoch++, state.block_number++;
    state.ready.clear();
    prepare_fibers();
    prepare_shared();
    check_block();
    std::vector<int> &ready = state.ready;
    size_t head = 0;
    while (state.done < state.threads && state.error.empty()) {
        if (head == ready.size()) {
            state.error = deadlock();
            break;
        }
        if (state.launch->max_switches && state.switches > state.launch->max_switches) {
            state.error = "gave up after " + std::to_string(state.switches) + " fiber switches";
            break;
        }
        int next;
        if (state.launch->order == 0) { // first come, first served: warps advance side by side
            next = ready[head++];
        } else if (state.launch->order == 1) { // last come, first served: one warp runs as far ahead as it can
            next = ready.back(), ready.pop_back();
        } else {
            const size_t k = head + next_random() % (ready.size() - head);
            next = ready[k], ready[k] = ready.back(), ready.pop_back();
        }
        if (head > 4096) ready.erase(ready.begin(), ready.begin() + head), head = 0;
        jump(&state.scheduler, &state.fibers[next]);
    }
    if (state.error.empty()) check_end_of_block();
}

int run(const char *name, Body body, void *kernel, void **arguments, const Launch *how) {
    state.launch = how, state.body = body, state.kernel = kernel, state.arguments = arguments;
    state.error.clear(), state.switches = 0;
    state.random = (how->seed + 1) * 0x9E3779B97F4A7C15ull | 1;
    grid_dim = {how->grid[0], how->grid[1], how->grid[2]};
    block_dim = {how->block[0], how->block[1], how->block[2]};
    state.threads = block_dim.x * block_dim.y * block_dim.z;
    check_launch();
    catch_crashes(true);
    std::vector<uint64_t> order((uint64_t)grid_dim.x * grid_dim.y * grid_dim.z);
    for (size_t i = 0; i < order.size(); i++) order[i] = i;
    if (how->order == 1) std::reverse(order.begin(), order.end());
    if (how->order == 2)
        for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[next_random() % i]);
    for (uint64_t b : order) {
        block_index = {(unsigned)(b % grid_dim.x), (unsigned)(b / grid_dim.x % grid_dim.y),
                       (unsigned)(b / ((uint64_t)grid_dim.x * grid_dim.y))};
        run_block();
        if (!state.error.empty()) break;
    }
    catch_crashes(false);
    current = &state.scheduler;
    if (state.error.empty()) return 0;
    snprintf(how->error, how->error_bytes, "%s: %s", name, state.error.c_str());
    return 1;
}

} // namespace cudabench
