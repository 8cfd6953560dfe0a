// The checks of mode "race": every load and store of a kernel compiled with -fsanitize=thread calls a __tsan_ function,
// and these are ours. Compiled without -fsanitize=thread, linked instead of libtsan.
//
// Two accesses of one byte, one of them a write, race unless a barrier, or a __syncwarp between their lanes, lies
// between them; blocks of one launch are never ordered. Shuffles and votes order nothing (CUDA C++ Programming Guide,
// "Warp Shuffle Functions": no memory barrier is implied).
#include "check.h"
#include <algorithm>
#include <stdio.h>
#include <unordered_map>

extern "C" char __ehdr_start[] __attribute__((visibility("hidden"))), _end[] __attribute__((visibility("hidden")));

namespace cudabench {
namespace {

struct Access {
    uint32_t block = 0; // serial number over all launches; 0: none
    uint16_t epoch = 0, thread = 0;
    uint32_t clock = 0; // of its lane
    Place place = 0;
};
struct Cell {                // one byte of memory
    Access write, read, other; // the last write; two reads since, of different warps or blocks where there are such
};
struct SharedCell : Cell {
    uint32_t pending_block = 0; // a cp.async into this byte has been issued in this block and not waited for
    int pending_thread = 0;
    Place pending_place = 0;
};
struct Buffer {
    char *start;
    size_t bytes;
    bool undefined;
};
struct Page {
    Cell cells[4096];
};

std::vector<Buffer> buffers;
std::unordered_map<uintptr_t, Page *> pages;
uintptr_t last_page_number;
Page *last_page;
std::vector<SharedCell> static_cells, dynamic_cells;
uint32_t first_block, first_epoch;

bool same_block(const Access &a) { return a.block == (uint32_t)state.block_number; }
uint16_t epoch_now() { return (uint16_t)(state.epoch - first_epoch); }

bool ordered(const Access &a, const Fiber *f) {
    if (a.block < first_block) return true;
    if (!same_block(a)) return false;
    if (a.thread == f->id || a.epoch != epoch_now()) return true;
    return a.thread / 32 == f->id / 32 && f->clock[a.thread & 31] >= a.clock;
}

Access access_of(const Fiber *f, Place place) {
    Access a;
    a.block = (uint32_t)state.block_number, a.epoch = epoch_now(), a.thread = (uint16_t)f->id;
    a.clock = f->clock[f->id & 31], a.place = place;
    return a;
}

[[noreturn]] void race(const std::string &what, const char *kind, Place place, const Access &a, const char *other) {
    std::string who = "thread " + std::to_string(a.thread);
    if (!same_block(a)) who += " of another block";
    fault_text(place_text(place).c_str(), std::string("race: ") + kind + " of " + what + " and " + other + " by " + who +
                                              " at " + place_text(a.place) + ", with nothing between that orders them");
}

// `name` builds the text of "what": only for an error.
template <class Name> void visit(Cell &c, const Fiber *f, bool write, Place place, const Name &name) {
    if (!ordered(c.write, f)) race(name(), write ? "write" : "read", place, c.write, "a write");
    if (!write) {
        const Access a = access_of(f, place);
        auto near = [](const Access &x, const Access &y) { return x.block == y.block && x.thread / 32 == y.thread / 32; };
        if (ordered(c.read, f)) c.read = a; // this thread's own are, too
        else if (ordered(c.other, f) || (near(c.other, c.read) && !near(a, c.read))) c.other = a;
        return;
    }
    if (!ordered(c.read, f)) race(name(), "write", place, c.read, "a read");
    if (!ordered(c.other, f)) race(name(), "write", place, c.other, "a read");
    c.write = access_of(f, place), c.read = Access(), c.other = Access();
}

void shared_access(std::vector<SharedCell> &cells, const char *kind, size_t offset, int bytes, bool write, Place place) {
    const Fiber *f = fiber();
    for (size_t i = offset; i < offset + bytes && i < cells.size(); i++) {
        SharedCell &c = cells[i];
        if (!same_block(c.write)) c.write = Access(); // left by the block before
        if (!same_block(c.read)) c.read = Access();
        if (!same_block(c.other)) c.other = Access();
        auto name = [&] { return std::string(kind) + " shared byte " + std::to_string(i); };
        if (c.pending_block == (uint32_t)state.block_number)
            fault_text(place_text(place).c_str(), std::string(write ? "write" : "read") + " of " + name() +
                                                      " while a cp.async of thread " + std::to_string(c.pending_thread) +
                                                      " at " + place_text(c.pending_place) + " has not been waited for");
        if (!write && c.write.block == 0) fault_text(place_text(place).c_str(), "uninitialised read of " + name());
        visit(c, f, write, place, name);
    }
}

Cell &cell_of(uintptr_t address) {
    const uintptr_t number = address >> 12;
    if (number != last_page_number || !last_page) {
        Page *&page = pages[number];
        if (!page) page = new Page();
        last_page = page, last_page_number = number;
    }
    return last_page->cells[address & 4095];
}

std::string near_what(const char *p) {
    std::string best = "no buffer is near";
    size_t distance = 1ull << 40;
    for (size_t k = 0; k < buffers.size(); k++) {
        const Buffer &b = buffers[k];
        const size_t d = p < b.start ? b.start - p : p >= b.start + b.bytes ? p - (b.start + b.bytes) : 0;
        if (d < distance) {
            distance = d;
            best = "offset " + std::to_string(p - b.start) + " of array " + std::to_string(k) + ", which has " +
                   std::to_string(b.bytes) + " bytes";
        }
    }
    return best;
}

void global_access(char *p, int bytes, bool write, Place place, bool atomic) {
    for (size_t k = 0; k < buffers.size(); k++) {
        const Buffer &b = buffers[k];
        if (p < b.start || p + bytes > b.start + b.bytes) continue;
        if (atomic) return;
        const Fiber *f = fiber();
        for (int i = 0; i < bytes; i++) {
            Cell &c = cell_of((uintptr_t)p + i);
            auto name = [&] {
                return "global memory, byte " + std::to_string(p + i - b.start) + " of array " + std::to_string(k);
            };
            if (!write && b.undefined && c.write.block < first_block)
                fault_text(place_text(place).c_str(), "uninitialised read of " + name());
            visit(c, f, write, place, name);
        }
        return;
    }
    fault_text(place_text(place).c_str(), std::string(write ? "write" : "read") + " of " + std::to_string(bytes) +
                                              " bytes out of bounds (" + near_what(p) + ")");
}

bool on_a_stack(const char *p) { // this fiber's, or another's: ldmatrix and mma hand out pointers to locals
    for (int i = 0; i < state.threads; i++)
        if (p >= state.fibers[i].stack && p < state.fibers[i].stack + stack_bytes) return true;
    return false;
}

} // namespace

std::string place_text(Place place) {
    if (place & place_is_text) return __ehdr_start + (place & ~place_is_text);
    char text[32];
    snprintf(text, sizeof text, "<pc:%x>", place);
    return text;
}
Place place_of_pc(const void *pc) { return (Place)((const char *)pc - __ehdr_start); }
Place place_of_text(const char *text) { return (Place)(text - __ehdr_start) | place_is_text; }

void access(const void *pointer, int bytes, bool write, Place place, bool atomic) {
    const Fiber *f = fiber();
    char *p = (char *)pointer;
    if (!f || f == &state.scheduler || f->status != Status::ready) return;
    if (p >= f->stack && p < f->stack + stack_bytes) return;
    if (p >= __start_cudabench_shared && p < __stop_cudabench_shared) {
        const size_t offset = p - __start_cudabench_shared;
        if (!atomic) shared_access(static_cells, "static", offset, bytes, write, place);
        else for (int i = 0; i < bytes; i++) static_cells[offset + i].write = access_of(f, place);
        return count_access(Space::shared, offset, bytes, write, place);
    }
    if (p >= shared_area && p < shared_area + sizeof shared_area) {
        const int64_t offset = p - state.shared;
        if (offset < 0 || offset + bytes > (int64_t)state.launch->shared_bytes)
            fault_text(place_text(place).c_str(), "dynamic shared memory out of bounds: offset " + std::to_string(offset) +
                                                      " of " + std::to_string(state.launch->shared_bytes) + " bytes");
        if (!atomic) shared_access(dynamic_cells, "dynamic", offset, bytes, write, place);
        else for (int i = 0; i < bytes; i++) dynamic_cells[offset + i].write = access_of(f, place);
        const size_t before = __stop_cudabench_shared - __start_cudabench_shared;
        return count_access(Space::shared, (before + 127) / 128 * 128 + offset, bytes, write, place);
    }
    if (p >= __ehdr_start && p < _end) return; // the kernel's own constants
    if (p >= (char *)state.fibers.data() && p < (char *)(state.fibers.data() + state.fibers.size())) return; // threadIdx
    if (on_a_stack(p)) return;
    global_access(p, bytes, write, place, atomic);
    count_access(Space::global, (uint64_t)p, bytes, write, place);
}

void check_access(const void *pointer, int bytes, bool write, const char *where) {
    access(pointer, bytes, write, place_of_text(where), false);
}
void check_atomic(const void *pointer, int bytes, const void *pc) {
    aligned(pointer, bytes, place_of_pc(pc));
    access(pointer, bytes, true, place_of_pc(pc), true);
}

void aligned(const void *pointer, int bytes, Place place) {
    if (current && fiber() != &state.scheduler && (uintptr_t)pointer % bytes)
        fault_text(place_text(place).c_str(), "misaligned access of " + std::to_string(bytes) + " bytes");
}

void check_launch() {
    first_block = (uint32_t)state.block_number + 1;
    if (pages.size() > 4096) { // 800 MB
        for (auto &page : pages) delete page.second;
        pages.clear();
    }
    last_page = nullptr;
    count_launch();
}
void check_block() {
    first_epoch = state.epoch;
    static_cells.resize(__stop_cudabench_shared - __start_cudabench_shared);
    if (dynamic_cells.size() < state.launch->shared_bytes) dynamic_cells.resize(state.launch->shared_bytes);
}
void check_end_of_block() { count_block(); }

void check_warp_sync(Fiber *w, unsigned mask) { // everything before is seen by all lanes of the mask after
    uint32_t joined[32] = {};
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1)
            for (int o = 0; o < 32; o++) joined[o] = std::max(joined[o], w[l].clock[o]);
    for (int l = 0; l < 32; l++)
        if (mask >> l & 1) {
            memcpy(w[l].clock, joined, sizeof joined);
            w[l].clock[l]++;
        }
}

void check_async(const Copy &copy, bool landing) {
    const bool is_static = copy.to >= __start_cudabench_shared && copy.to < __stop_cudabench_shared;
    std::vector<SharedCell> &cells = is_static ? static_cells : dynamic_cells;
    const size_t offset = copy.to - (is_static ? __start_cudabench_shared : state.shared);
    auto mark = [&](uint32_t block) {
        for (size_t i = offset; i < offset + copy.bytes && i < cells.size(); i++) {
            SharedCell &c = cells[i];
            c.pending_block = block, c.pending_thread = fiber()->id, c.pending_place = place_of_text(copy.where);
        }
    };
    if (landing) { // from here on the data are the issuing thread's, like a write of its own
        mark(0);
        count_pause(true);
        check_access(copy.to, copy.bytes, true, copy.where);
        count_pause(false);
        count_async(-copy.bytes);
        return;
    }
    if (copy.source_bytes) check_access(copy.from, copy.source_bytes, false, copy.where);
    check_access(copy.to, copy.bytes, true, copy.where);
    mark((uint32_t)state.block_number);
    count_async(copy.bytes);
}

} // namespace cudabench

using namespace cudabench;
#define HERE place_of_pc(__builtin_return_address(0))
#define CUDABENCH_EXTERN extern "C" __attribute__((visibility("default")))
CUDABENCH_EXTERN void cudabench_forget_buffers() { buffers.clear(); }
CUDABENCH_EXTERN void cudabench_add_buffer(void *start, size_t bytes, int undefined) {
    buffers.push_back({(char *)start, bytes, undefined != 0});
}
CUDABENCH_EXTERN const char *cudabench_base() { return __ehdr_start; }

extern "C" {
#define HOOKS(N)                                                                                                       \
    void __tsan_read##N(void *p) { aligned(p, N, HERE), access(p, N, false, HERE, false); }                            \
    void __tsan_write##N(void *p) { aligned(p, N, HERE), access(p, N, true, HERE, false); }                            \
    void __tsan_unaligned_read##N(void *p) { access(p, N, false, HERE, false); }                                       \
    void __tsan_unaligned_write##N(void *p) { access(p, N, true, HERE, false); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void *p, size_t n) { access(p, (int)n, false, HERE, false); }
void __tsan_write_range(void *p, size_t n) { access(p, (int)n, true, HERE, false); }
void __tsan_vptr_update(void **, void *) {}
void __tsan_vptr_read(void **) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __tsan_init() {}
char __tsan_atomic8_load(const char *p, int) { return *p; } // guards of function-local statics
}
