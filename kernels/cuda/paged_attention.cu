// Causal attention over paged K/V without tensor cores: decode, prefill and chunks are one kernel.
//
// Grid: (workers, KV heads), 128 threads. Workers walk the work list with the grid's stride, so that a captured graph
// holds at any length. A work item is up to ROWS query rows (tokens x heads of one KV head) by one part of the context.
// Each of the four warps takes one slice of 16 tokens of every tile: lane = (token, half of the head's chunks) for Q.K,
// and lanes own pairs of dimensions for P.V.
//
// Bytes: K and V of the part once for each item, 2 * tokens * head_dim * itemsize; Q and the result are small beside it.
// Operations: 4 * tokens * head_dim for each row. Roof: memory bandwidth while rows are few (decode), float32
// multiply-adds beyond about 4 rows; there tensor cores take over (paged_attention_tensor.cu).
#include "attention.cuh"

#ifndef ROWS
#define ROWS 8
#endif
#define THREADS (32 * SLICES)
#define PAIRS ((DIMS + 63) / 64) // pairs of dimensions that a lane owns, of each 64: 2 * lane, 2 * lane + 1
#define PIECE_PAIRS (PAIRS / PIECES)

__device__ __forceinline__ float2 value_pair(const unsigned char *row, int pair, float) {
    return *reinterpret_cast<const float2 *>(row + pair * 8);
}
template <class T> __device__ __forceinline__ float2 value_pair(const unsigned char *row, int pair, T kind) {
    return unpack2(*reinterpret_cast<const unsigned *>(row + pair * 4), kind);
}

// What a warp keeps of a row: maximum (log2), the lane's own sum, and the accumulator of its dimensions.
struct RowState {
    float maximum, sum;
    float weighted[2 * PAIRS];
};

// products += a piece of Q . K: this lane's half of its chunks, for its token of the warp's 16.
__device__ __forceinline__ void multiply_slice(const unsigned char *keys, const float *query, int rows,
                                               float (&products)[ROWS]) {
    const int lane = threadIdx.x & 31, half = lane >> 4;
#pragma unroll 4
    for (int chunk = half; chunk < PIECE_DIMS / CHUNK; chunk += 2) {
        float key[CHUNK];
        unpack(*reinterpret_cast<const uint4 *>(keys + (lane & 15) * ROW_BYTES + chunk * 16), key, stored_t());
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            if (r < rows) {
#pragma unroll
                for (int i = 0; i < CHUNK; i += 4) {
                    const float4 q = *reinterpret_cast<const float4 *>(query + r * DIMS + chunk * CHUNK + i);
                    products[r] = fmaf(q.x, key[i], products[r]);
                    products[r] = fmaf(q.y, key[i + 1], products[r]);
                    products[r] = fmaf(q.z, key[i + 2], products[r]);
                    products[r] = fmaf(q.w, key[i + 3], products[r]);
                }
            }
    }
}

// Scores of the warp's 16 tokens for all rows, the new maxima, and weights into `weights` [ROWS][16].
__device__ __forceinline__ void score_slice(const float (&products)[ROWS], int rows, int token, const Sight *sights,
                                            Scoring scoring, RowState (&states)[ROWS], float *weights) {
    const int lane = threadIdx.x & 31, half = lane >> 4;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (r >= rows) continue;
        const float product = products[r] + __shfl_xor_sync(FULL_MASK, products[r], 16);
        const bool seen = token >= sights[r].first && token <= sights[r].last;
        const float score = seen ? score_of(product, scoring) : NEG_INF;
        float highest = score;
#pragma unroll
        for (int lanes = 8; lanes; lanes >>= 1) highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, lanes));
        const float maximum = fmaxf(states[r].maximum, highest), kept = decay(states[r].maximum, maximum);
        const float weight = score == NEG_INF ? 0.f : exp2f(score - maximum); // a NaN score makes a NaN weight
        states[r].maximum = maximum;
        states[r].sum = fmaf(states[r].sum, kept, weight);
#pragma unroll
        for (int i = 0; i < 2 * PAIRS; i++) states[r].weighted[i] *= kept;
        if (half == 0) weights[r * 16 + lane] = weight;
    }
}

// weighted += weights . V over the warp's 16 tokens, in the dimensions of a piece. A row takes only tokens that it sees:
// weight 0 times NaN is NaN.
__device__ __forceinline__ void weigh_slice(const unsigned char *values, int piece, const float *weights, int rows,
                                            int token0, const Sight *sights, RowState (&states)[ROWS]) {
    const int lane = threadIdx.x & 31, first = piece * PIECE_PAIRS;
    for (int t = 0; t < 16; t++) {
        float2 value[PIECE_PAIRS];
#pragma unroll
        for (int i = 0; i < PIECE_PAIRS; i++) {
            const int pair = lane + 32 * i;
            value[i] = 2 * pair < PIECE_DIMS ? value_pair(values + t * ROW_BYTES, pair, stored_t()) : make_float2(0.f, 0.f);
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r < rows && token0 + t >= sights[r].first && token0 + t <= sights[r].last) {
                const float weight = weights[r * 16 + t];
#pragma unroll
                for (int i = 0; i < PIECE_PAIRS; i++) {
                    float *weighted = states[r].weighted + 2 * (first + i);
                    weighted[0] = fmaf(weight, value[i].x, weighted[0]);
                    weighted[1] = fmaf(weight, value[i].y, weighted[1]);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
paged_attention(const int *__restrict__ items, const int *__restrict__ num_items, const int *__restrict__ tokens,
                const int *__restrict__ positions, const int *__restrict__ state_starts,
                const int *__restrict__ state_counts, const int *__restrict__ tables, int table_width,
                const float *__restrict__ query, long long query_stride, const stored_t *__restrict__ pool0,
                const stored_t *__restrict__ pool1, const stored_t *__restrict__ pool2,
                const stored_t *__restrict__ pool3, long long block_stride, long long layer_offset,
                long long kv_stride, long long head_stride, int block_size, float *__restrict__ out,
                long long out_stride, float *__restrict__ state_values, float *__restrict__ state_scalars,
                const float *__restrict__ sinks, int group, int window, float scale, float cap) {
    extern __shared__ __align__(16) unsigned char shared[];
    // The ring comes first; at an item's end the same memory holds the warps' results, [SLICES][ROWS][DIMS].
    unsigned char *ring = shared;
    float *merged = reinterpret_cast<float *>(shared);
    const int overlay = max(BUFFERS * STAGE_BYTES, SLICES * ROWS * DIMS * 4);
    float *queries = reinterpret_cast<float *>(shared + overlay); // the queries, [ROWS][DIMS]
    float *weights = queries + ROWS * DIMS;                       // [SLICES][ROWS][16]
    const stored_t **blocks = reinterpret_cast<const stored_t **>(weights + SLICES * ROWS * 16);
    __shared__ Sight sights[ROWS];
    __shared__ float maxima[SLICES][ROWS], sums[SLICES][ROWS];

    const Cache cache = {pool0, pool1, pool2, pool3, block_stride, layer_offset, kv_stride, head_stride, block_size};
    const Scoring scoring = {scale, cap};
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kv_head = blockIdx.y, heads = gridDim.y * group;
    clear_padding(ring);

    for (int index = blockIdx.x; index < *num_items; index += gridDim.x) {
        const WorkItem item = reinterpret_cast<const WorkItem *>(items)[index];
        const int rows = item.num_rows, tile0 = item.low / TILE * TILE;
        const int halves = 2 * ((item.high - tile0 + TILE - 1) / TILE);
        resolve_blocks(cache, tables + (long long)item.table * table_width, kv_head, item.low, item.high, blocks);
        for (int i = threadIdx.x; i < rows * DIMS; i += THREADS) {
            const int row = item.first_row + i / DIMS, dim = i % DIMS;
            const float *source = query + tokens[row / group] * query_stride;
            queries[i] = dim < HEAD_DIM ? source[(long long)(kv_head * group + row % group) * HEAD_DIM + dim] : 0.f;
        }
        if (threadIdx.x < rows)
            sights[threadIdx.x] = sight_of(positions[tokens[(item.first_row + threadIdx.x) / group]], window);
        __syncthreads();

        RowState states[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            states[r].maximum = NEG_INF;
            states[r].sum = 0.f;
#pragma unroll
            for (int i = 0; i < 2 * PAIRS; i++) states[r].weighted[i] = 0.f;
        }
        for (int stage = 0; stage < BUFFERS - 1; stage++)
            if (stage < halves * PIECES)
                load_stage(cache, blocks, stage, tile0, item.low, item.high, ring + stage * STAGE_BYTES);
            else copies_commit(); // groups are counted, empty ones too
        for (int half = 0; half < halves; half++) {
            float products[ROWS];
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                copies_wait<BUFFERS - 2>();
                __syncthreads(); // everybody's copies of this stage are there, and the stage before is done with
                const int stage = half * PIECES + piece, next = stage + BUFFERS - 1;
                if (next < halves * PIECES)
                    load_stage(cache, blocks, next, tile0, item.low, item.high, ring + next % BUFFERS * STAGE_BYTES);
                else copies_commit();
                const unsigned char *slice = ring + stage % BUFFERS * STAGE_BYTES + warp * 16 * ROW_BYTES;
                const int token0 = tile0 + (half >> 1) * TILE + warp * 16;
                if (half & 1) {
                    __syncwarp(FULL_MASK); // the weights of all lanes
                    weigh_slice(slice, piece, weights + warp * ROWS * 16, rows, token0, sights, states);
                    __syncwarp(FULL_MASK);
                } else {
                    if (piece == 0) {
#pragma unroll
                        for (int r = 0; r < ROWS; r++) products[r] = 0.f;
                    }
                    multiply_slice(slice, queries + piece * PIECE_DIMS, rows, products);
                    if (piece == PIECES - 1)
                        score_slice(products, rows, token0 + (lane & 15), sights, scoring, states,
                                    weights + warp * ROWS * 16);
                }
            }
        }
        __syncthreads(); // the ring is done with

#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= rows) continue;
            float sum = states[r].sum; // both halves of the warp hold the same 16 sums
            for (int lanes = 8; lanes; lanes >>= 1) sum += __shfl_xor_sync(FULL_MASK, sum, lanes);
            if (lane == 0) {
                maxima[warp][r] = states[r].maximum;
                sums[warp][r] = sum;
            }
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const int dim = 2 * (lane + 32 * i);
                if (dim < DIMS)
                    *reinterpret_cast<float2 *>(merged + (warp * ROWS + r) * DIMS + dim) =
                        make_float2(states[r].weighted[2 * i], states[r].weighted[2 * i + 1]);
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < rows * HEAD_DIM; i += THREADS) {
            const int r = i / HEAD_DIM, dim = i % HEAD_DIM;
            float maximum = maxima[0][r], sum = 0.f, weighted = 0.f;
            for (int s = 1; s < SLICES; s++) maximum = fmaxf(maximum, maxima[s][r]);
            for (int s = 0; s < SLICES; s++) {
                const float kept = decay(maxima[s][r], maximum);
                sum = fmaf(sums[s][r], kept, sum);
                weighted = fmaf(merged[(s * ROWS + r) * DIMS + dim], kept, weighted);
            }
            write_row(item, r, dim, kv_head, group, heads, tokens, positions, window, state_starts, state_counts, maximum,
                      sum, weighted, out, out_stride, state_values, state_scalars, sinks);
        }
        __syncthreads(); // before the next item overwrites what this one reads
        if (HEAD_DIM != DIMS) clear_padding(ring);
    }
}
