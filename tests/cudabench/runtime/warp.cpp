// Operations in which the lanes of a warp meet, tensor-core and asynchronous-copy instructions included.
#include "runtime.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include <algorithm>

namespace cudabench {

uint16_t narrow_half(float f) { return float_to_half(f); }
uint16_t narrow_bfloat16(float f) { return float_to_bfloat16(f); }

// mma.m16n8k16 and m16n8k8, row.col, float32 sums. Fragment layout: PTX ISA, "Matrix Fragments for mma.m16n8k16 with
// floating point type". Sums run over k in order, in float32; tensor cores sum in an order that NVIDIA does not state.
static void do_mma(Fiber *w, int k, bool bf) {
    float a[16][16], b[16][8];
    auto widen = [&](unsigned two, int i) {
        const uint16_t h = (uint16_t)(two >> (16 * i));
        return bf ? bfloat16_to_float(h) : half_to_float(h);
    };
    for (int lane = 0; lane < 32; lane++) {
        const int group = lane >> 2, within = (lane & 3) * 2;
        const unsigned *ra = (const unsigned *)w[lane].source_a, *rb = (const unsigned *)w[lane].source_b;
        for (int r = 0; r < k / 4; r++)
            for (int i = 0; i < 2; i++) a[group + (r & 1) * 8][within + i + (r >> 1) * 8] = widen(ra[r], i);
        for (int r = 0; r < k / 8; r++)
            for (int i = 0; i < 2; i++) b[within + i + r * 8][group] = widen(rb[r], i);
    }
    for (int lane = 0; lane < 32; lane++) {
        const int group = lane >> 2, within = (lane & 3) * 2;
        const float *c = (const float *)w[lane].source_c;
        for (int i = 0; i < 4; i++) {
            const int row = group + (i >> 1) * 8, column = within + (i & 1);
            float sum = c[i];
            for (int j = 0; j < k; j++) sum += a[row][j] * b[j][column];
            ((float *)w[lane].result)[i] = sum;
        }
    }
}

// ldmatrix: lane 8m + r gives the address of row r of matrix m; lane l receives elements 2(l%4), 2(l%4)+1 of row l/4,
// or of column l/4 when transposed.
static void do_ldmatrix(Fiber *w, int count, bool transposed) {
    for (int m = 0; m < count; m++)
        for (int lane = 0; lane < 32; lane++) {
            uint16_t pair[2];
            for (int i = 0; i < 2; i++) {
                int row = lane >> 2, column = (lane & 3) * 2 + i;
                if (transposed) std::swap(row, column);
                pair[i] = ((const uint16_t *)w[m * 8 + row].source_a)[column];
            }
            memcpy((unsigned *)w[lane].result + m, pair, 4);
        }
}

static uint32_t combine(int operation, uint32_t a, uint32_t b) {
    switch (operation) {
    case 0: case 8: return a + b;
    case 1: return std::min(a, b);
    case 2: return std::max(a, b);
    case 9: return std::min((int32_t)a, (int32_t)b);
    case 10: return std::max((int32_t)a, (int32_t)b);
    case 3: return a & b;
    case 4: return a | b;
    default: return a ^ b;
    }
}

static void complete(Fiber *w, WarpOp op, unsigned mask, const char *where) {
    auto named = [&](int lane) { return mask >> lane & 1; };
    uint64_t before[32], all = 0;
    for (int l = 0; l < 32; l++) before[l] = named(l) ? w[l].value : 0;
    for (int l = 0; l < 32; l++)
        if (named(l)) w[l].rendezvous++;
    switch (op) {
    case WarpOp::sync: check_warp_sync(w, mask); break;
    case WarpOp::shuffle:
        for (int l = 0; l < 32; l++)
            if (named(l)) {
                if (!named(w[l].detail))
                    fault_text(where, "lane " + std::to_string(l) + " shuffles from lane " +
                                          std::to_string(w[l].detail) + ", which is not in the mask");
                w[l].value = before[w[l].detail];
            }
        break;
    case WarpOp::ballot:
        for (int l = 0; l < 32; l++) all |= (uint64_t)(named(l) && before[l]) << l;
        for (int l = 0; l < 32; l++) w[l].value = named(l) ? all : w[l].value;
        break;
    case WarpOp::reduce: {
        const int first = __builtin_ctz(mask);
        uint32_t sum = (uint32_t)before[first];
        for (int l = first + 1; l < 32; l++)
            if (named(l)) sum = combine(w[first].detail, sum, (uint32_t)before[l]);
        for (int l = 0; l < 32; l++) w[l].value = named(l) ? sum : w[l].value;
        break;
    }
    case WarpOp::match:
        for (int l = 0; l < 32; l++)
            if (named(l)) {
                uint64_t same = 0;
                for (int o = 0; o < 32; o++) same |= (uint64_t)(named(o) && before[o] == before[l]) << o;
                w[l].value = same;
            }
        break;
    case WarpOp::mma: do_mma(w, w[0].detail & 31, w[0].detail & 32); break;
    case WarpOp::ldmatrix: do_ldmatrix(w, w[0].detail & 7, w[0].detail & 8); break;
    }
}

// The lanes of a mask wait for each other; the last one does the work for all.
static void meet(const char *where, WarpOp op, unsigned mask) {
    Fiber *me = fiber();
    const int base = me->id & ~31, lane = me->id & 31, lanes = std::min(32, state.threads - base);
    Fiber *w = &state.fibers[base];
    me->where = where;
    if (!(mask >> lane & 1)) fault(where, "the calling lane is not in its own mask");
    if (lanes < 32 && mask >> lanes) fault(where, "the mask names lanes that the block does not have");
    me->op = op, me->mask = mask, me->status = Status::warp;
    for (int l = 0; l < lanes; l++) {
        if (!(mask >> l & 1)) continue;
        if (w[l].status == Status::done)
            fault_text(where, "the mask names lane " + std::to_string(l) + ", which has returned");
        if (w[l].status != Status::warp) return wait_here();
        if (w[l].op != op || w[l].mask != mask || (w[l].where != where && strcmp(w[l].where, where))) {
            if (w[l].mask >> lane & 1)
                fault_text(where, std::string("lanes of one mask meet in different operations, the other at ") +
                                      w[l].where);
            return wait_here();
        }
    }
    complete(w, op, mask, where);
    for (int l = 0; l < lanes; l++)
        if ((mask >> l & 1) && l != lane) wake(w[l]);
    me->status = Status::ready;
    if (state.launch->order) { // adversarial orders: the last to come need not be the first to go on
        state.ready.push_back(me->id);
        wait_here();
    }
}

void warp_barrier(const char *where, unsigned mask) { meet(where, WarpOp::sync, mask); }

uint64_t shuffle(const char *where, unsigned mask, uint64_t value, int source, int) {
    Fiber *me = fiber();
    me->value = value, me->detail = source;
    meet(where, WarpOp::shuffle, mask);
    return me->value;
}
unsigned ballot(const char *where, unsigned mask, int predicate) {
    fiber()->value = predicate;
    meet(where, WarpOp::ballot, mask);
    return (unsigned)fiber()->value;
}
unsigned match_any(const char *where, unsigned mask, uint64_t value) {
    fiber()->value = value;
    meet(where, WarpOp::match, mask);
    return (unsigned)fiber()->value;
}
unsigned reduce(const char *where, unsigned mask, unsigned value, int operation) {
    fiber()->value = value, fiber()->detail = operation;
    meet(where, WarpOp::reduce, mask);
    return (unsigned)fiber()->value;
}
void mma(const char *where, float *d, const unsigned *a, const unsigned *b, const float *c, int k, bool bf) {
    Fiber *me = fiber();
    me->result = d, me->source_a = a, me->source_b = b, me->source_c = c, me->detail = k | (bf ? 32 : 0);
    meet(where, WarpOp::mma, ~0u);
}
void ldmatrix(const char *where, unsigned *d, const void *row, int count, bool transposed) {
    Fiber *me = fiber();
    if ((me->id & 31) < count * 8) { // only these lanes' addresses are used
        if ((uintptr_t)row % 16) fault(where, "ldmatrix: the row is not aligned to 16 bytes");
        check_access(row, 16, false, where);
    }
    me->result = d, me->source_a = row, me->detail = count | (transposed ? 8 : 0);
    meet(where, WarpOp::ldmatrix, ~0u);
}

// --- cp.async: in the forward order a copy lands as late as its wait allows, in reverse at once, at random either way
static void land(const Copy &c) {
    memcpy(c.to, c.from, c.source_bytes);
    memset(c.to + c.source_bytes, 0, c.bytes - c.source_bytes);
}
void async_copy(const char *where, void *to, const void *from, int bytes, int source_bytes) {
    if (bytes != 4 && bytes != 8 && bytes != 16) fault(where, "cp.async copies 4, 8 or 16 bytes");
    if (source_bytes < 0 || source_bytes > bytes) fault(where, "cp.async: source size beyond the copy's");
    if (((uintptr_t)to | (uintptr_t)from) % bytes) fault(where, "cp.async: misaligned");
    const bool at_once = state.launch->order == 1 || (state.launch->order == 2 && next_random() & 1);
    const Copy copy{where, (char *)to, (const char *)from, bytes, source_bytes, at_once};
    check_async(copy, false);
    if (at_once) land(copy);
    fiber()->open.push_back(copy);
}
void async_commit() {
    Fiber *me = fiber();
    me->groups.push_back(std::move(me->open));
    me->open.clear();
}
void async_wait(int groups) {
    Fiber *me = fiber();
    while ((int)me->groups.size() > groups) {
        for (const Copy &c : me->groups.front()) {
            check_async(c, true);
            if (!c.landed) land(c);
        }
        me->groups.erase(me->groups.begin());
    }
}

unsigned shared_address(const char *where, const void *pointer) {
    const intptr_t offset = (const char *)pointer - shared_area;
    if (offset != (int32_t)offset) fault(where, "the address is not in shared memory");
    return (unsigned)offset;
}
void *shared_pointer(const char *, unsigned address) { return shared_area + (int32_t)address; }
void atomic_access(const void *pointer, int bytes) { check_atomic(pointer, bytes, __builtin_return_address(0)); }

} // namespace cudabench
