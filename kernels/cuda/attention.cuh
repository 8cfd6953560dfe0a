// What both attention kernels share: work items, the blocks behind a tile, the ring of tiles, and the end of a row.
//
// The context of a query is cut at multiples of PART tokens, a part into tiles of TILE tokens, both aligned at position
// 0; a tile has four slices of 16 tokens. A slice of a part is an online softmax over its tiles in order (Milakov &
// Gimelshein 2018); the four slices of a part, then the parts of a context, are merged in order by log-sum-exp (Dao
// 2023, Flash-Decoding). So a row's arithmetic follows from its position alone, whoever shares its work item.
#pragma once
#include "common.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef BLOCK_SIZE // tokens of a block where known at compile time; 0: the argument counts
#define BLOCK_SIZE 0
#endif
#ifndef WIDE_LOADS // K and V rows are whole, aligned 16-byte chunks; 0: element by element, any head_dim and K order
#define WIDE_LOADS 1
#endif
#ifndef BUFFERS // stages in the ring; BUFFERS - 1 of them are on their way
#define BUFFERS 4
#endif
#ifndef PIECES // stages that a half (K or V of a tile) comes in, each with DIMS / PIECES columns of all its tokens
#define PIECES 1
#endif

#define TILE 64
#define PART 512
#define SLICES 4
#define DIMS ((HEAD_DIM + 15) / 16 * 16) // head_dim padded with zeros: two chunks of float16, a step of the tensor cores
#define PIECE_DIMS (DIMS / PIECES)
#define ROW_CHUNKS (PIECE_DIMS / CHUNK + 1) // of a row in shared memory: odd, so that 8 rows touch all banks once
#define ROW_BYTES (ROW_CHUNKS * 16)
#define STAGE_BYTES (TILE * ROW_BYTES)
static_assert(PIECES == 1 || HEAD_DIM % (64 * PIECES) == 0, "a piece has whole pairs of all lanes, and no padding");

// One entry of the work list; made by plan.py, whose `ITEM_FIELDS` is the same list.
struct WorkItem {
    int first_row;  // into the rows of all queries: an entry of `tokens` by a head of the group
    int num_rows;   // at most ROWS
    int table;      // row of `tables` whose blocks are read
    int part;       // of the context
    int low, high;  // tokens that any row of the item sees in this part: low..high-1
    int unused[2];
};

// The K/V arrays of a KV group: kernels' view of cupaged.kernels.interface.KVView, for one layer. Strides in elements.
struct Cache {
    const stored_t *pool0, *pool1, *pool2, *pool3;
    long long block_stride, layer_offset, kv_stride, head_stride;
    int block_size;
};

// Selected, not indexed: an array of arguments indexed at run time would be copied to local memory.
__device__ __forceinline__ const stored_t *pool_of(const Cache &cache, int reference) {
    const int pool = reference >> POOL_SHIFT & 3;
    return pool == 0 ? cache.pool0 : pool == 1 ? cache.pool1 : pool == 2 ? cache.pool2 : cache.pool3;
}

// The first element of K of every block of a part, resolved once per block and work item: pool, frame and head.
__device__ __forceinline__ void resolve_blocks(const Cache &cache, const int *table, int kv_head, int low, int high,
                                               const stored_t **blocks) {
    const int size = BLOCK_SIZE ? BLOCK_SIZE : cache.block_size;
    const int first = low / size, count = (high - 1) / size - first + 1;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int reference = table[first + i];
        blocks[i] = pool_of(cache, reference) + (long long)(reference & FRAME_MASK) * cache.block_stride +
                    cache.layer_offset + kv_head * cache.head_stride;
    }
}

// Start loading stage `stage` of the item into `target`: piece stage % PIECES of half stage / PIECES (even: K of tile
// half / 2, odd: its V). Tokens outside low..high-1 become zeros, so that what unused slots hold is never read.
__device__ __forceinline__ void load_stage(const Cache &cache, const stored_t *const *blocks, int stage, int tile0,
                                           int low, int high, unsigned char *target) {
    const int size = BLOCK_SIZE ? BLOCK_SIZE : cache.block_size;
    const int half = stage / PIECES, column0 = stage % PIECES * PIECE_DIMS;
    const int first_block = low / size, start = tile0 + (half >> 1) * TILE;
    const long long side = half & 1 ? cache.kv_stride : 0;
#if WIDE_LOADS
    const int chunks = HEAD_DIM / PIECES / CHUNK;
    for (int i = threadIdx.x; i < TILE * chunks; i += blockDim.x) {
        const int row = i / chunks, chunk = i % chunks, token = start + row;
        const bool valid = token >= low && token < high;
        const stored_t *source = blocks[0];
        if (valid) {
            const int block = token / size;
            source = blocks[block - first_block] + side + (long long)(token - block * size) * HEAD_DIM + column0 +
                     chunk * CHUNK;
        }
        copy16(target + row * ROW_BYTES + chunk * 16, source, valid);
    }
#else
    const int columns = HEAD_DIM / PIECES;
    for (int i = threadIdx.x; i < TILE * columns; i += blockDim.x) {
        const int row = i / columns, column = i % columns, dim = column0 + column, token = start + row;
        stored_t value;
        narrow(0.f, &value);
        if (token >= low && token < high) {
            const int block = token / size, slot = token - block * size;
            const long long inner = K_TRANSPOSED && !(half & 1) ? (long long)dim * size + slot
                                                                : (long long)slot * HEAD_DIM + dim;
            value = blocks[block - first_block][side + inner];
        }
        reinterpret_cast<stored_t *>(target + row * ROW_BYTES)[column] = value;
    }
#endif
    copies_commit();
}

// Columns HEAD_DIM..DIMS-1 of the ring, which no load writes, as zeros.
__device__ __forceinline__ void clear_padding(unsigned char *ring) {
    if (HEAD_DIM == DIMS) return;
    const int extra = DIMS - HEAD_DIM > 0 ? DIMS - HEAD_DIM : 1;
    for (int i = threadIdx.x; i < BUFFERS * TILE * extra; i += blockDim.x) {
        stored_t *row = reinterpret_cast<stored_t *>(ring + (i / extra) * ROW_BYTES);
        narrow(0.f, row + HEAD_DIM + i % extra);
    }
}

// Which keys a row sees: first..last, none if last < first. A query at `position` sees `window` keys, its own included.
struct Sight {
    int first, last;
};
__device__ __forceinline__ Sight sight_of(int position, int window) {
    Sight sight = {0, position};
    if (position >= window) sight.first = position - window + 1;
    return sight;
}

// exp2(a - b) where a <= b, 1 where they are equal: two infinities of one sign are.
__device__ __forceinline__ float decay(float a, float b) { return a == b ? 1.f : exp2f(a - b); }

// The score of a dot product in units of log2: scale and, before the mask, the soft cap.
struct Scoring {
    float scale;     // scale * log2(e); with a soft cap scale / cap
    float cap;       // cap * log2(e), 0: none
};
__device__ __forceinline__ float score_of(float product, Scoring scoring) {
    const float scaled = product * scoring.scale;
    return scoring.cap != 0.f ? scoring.cap * tanhf(scaled) : scaled;
}

// What a row adds up: softmax numerator `weighted`, its maximum in log2 and its sum. Gives the finished element; a sink
// is a logit that enters the sum once and carries no value. Without anything to weigh: 0.
__device__ __forceinline__ float finished(float maximum, float sum, float weighted, const float *sinks, int head) {
    if (sinks) {
        const float sink = sinks[head] * LOG2E, highest = fmaxf(maximum, sink);
        if (highest != NEG_INF) {
            const float kept = maximum == NEG_INF && sum == 0.f ? 0.f : decay(maximum, highest);
            sum = fmaf(sum, kept, exp2f(sink - highest));
            weighted *= kept;
        }
    }
    return sum == 0.f ? 0.f : weighted / sum;
}

// Partial results of a call: state s of head h is DIMS floats at (s * heads + h) * HEAD_DIM of `values`, its maximum
// and sum at 2 * (s * heads + h) of `scalars`.
__device__ __forceinline__ long long state_index(int state, int heads, int head) {
    return (long long)state * heads + head;
}

// Ends a row of a part: the result itself if it is the row's only part, else a partial result for merge_parts.
__device__ __forceinline__ void write_row(const WorkItem &item, int r, int dim, int kv_head, int group, int heads,
                                          const int *tokens, const int *positions, int window, const int *state_starts,
                                          const int *state_counts, float maximum, float sum, float weighted, float *out,
                                          long long out_stride, float *state_values, float *state_scalars,
                                          const float *sinks) {
    const int row = item.first_row + r, token = tokens[row / group], head = kv_head * group + row % group;
    const Sight sight = sight_of(positions[token], window);
    if (sight.last < item.part * PART || sight.first >= (item.part + 1) * PART) return; // a neighbour's part
    if (state_counts[token] == 1) {
        out[token * out_stride + (long long)head * HEAD_DIM + dim] = finished(maximum, sum, weighted, sinks, head);
        return;
    }
    const long long state = state_index(state_starts[token] + item.part - sight.first / PART, heads, head);
    state_values[state * HEAD_DIM + dim] = weighted;
    if (dim == 0) {
        state_scalars[2 * state] = maximum;
        state_scalars[2 * state + 1] = sum;
    }
}
