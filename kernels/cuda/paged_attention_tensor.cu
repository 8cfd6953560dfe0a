// Causal attention over paged K/V on tensor cores, float16 or bfloat16, from sm_80 on: decode, prefill and chunks are
// one kernel. The work list, the ring and the order of merging are paged_attention.cu's.
//
// Grid: (workers, KV heads), 128 * ROW_TILES threads. A work item is up to 16 * ROW_TILES query rows by one part; warp
// (row tile, slice) takes 16 rows by one slice of 16 tokens of every tile: 16 x 16 scores, then 16 x head_dim sums.
//
// Queries and weights enter as two terms of the storage type each (x = high + low), so that the products are those of
// 22 (float16) or 16 (bfloat16) significant bits and the sums float32: the result is close to the float32 kernel's, at
// twice the tensor-core operations. A query row is first scaled by a power of two to below 2, and its scores back, so
// that no query is too large or too small for float16.
//
// Bytes: as paged_attention.cu. Operations: 8 * tokens * head_dim for each row of a tile, 16 rows always. Roof: memory
// bandwidth in decode; tensor cores in prefill.
#include "attention.cuh"
#include "tensor.cuh"

#ifndef ROW_TILES
#define ROW_TILES 1
#endif
#define ROWS (16 * ROW_TILES)
#define THREADS (32 * SLICES * ROW_TILES)
#define STEPS (DIMS / 16) // of 16 dimensions
#define PIECE_STEPS (STEPS / PIECES)
#define QUERY_BYTES (DIMS * 2 + 16) // of a row of one term; an odd number of 16-byte chunks

// What a warp's lane keeps of its two rows, g and g + 8: maxima (log2), its own part of the sums, and accumulators.
struct TileState {
    float maximum[2], sum[2];
    float weighted[2 * STEPS][4];
};

// Queries of the item as two terms, rows scaled to below 2; `factors` scale scores back. A warp takes a row at a time.
__device__ __forceinline__ void load_queries(const WorkItem &item, const float *query, long long query_stride,
                                             const int *tokens, int group, int kv_head, unsigned char *terms,
                                             float *factors) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int r = warp; r < ROWS; r += THREADS / 32) {
        const int row = item.first_row + r;
        const bool used = r < item.num_rows;
        const float *source = used ? query + tokens[row / group] * query_stride +
                                         (long long)(kv_head * group + row % group) * HEAD_DIM
                                   : query;
        unsigned largest = 0;
        for (int dim = lane; dim < HEAD_DIM; dim += 32)
            if (used) largest = max(largest, __float_as_uint(source[dim]) & 0x7fffffffu);
#pragma unroll
        for (int lanes = 16; lanes; lanes >>= 1) largest = max(largest, __shfl_xor_sync(FULL_MASK, largest, lanes));
        const int exponent = largest >> 23; // 0 for a row of zeros (or denormals), 255 for infinities and NaN
        const bool scaled = exponent > 0 && exponent < 254;
        const float down = scaled ? __uint_as_float((unsigned)(254 - exponent) << 23) : 1.f; // 2^(127 - exponent)
        if (lane == 0) factors[r] = scaled ? __uint_as_float((unsigned)exponent << 23) : 1.f;
        for (int pair = lane; pair < DIMS / 2; pair += 32) {
            const int dim = 2 * pair;
            const float x = used && dim < HEAD_DIM ? source[dim] * down : 0.f;
            const float y = used && dim + 1 < HEAD_DIM ? source[dim + 1] * down : 0.f;
            float x_left, y_left, x_rest, y_rest;
            unsigned char *target = terms + r * QUERY_BYTES + pair * 4;
            *reinterpret_cast<unsigned *>(target) = pack_pair(x, y, x_left, y_left);
            *reinterpret_cast<unsigned *>(target + ROWS * QUERY_BYTES) = pack_pair(x_left, y_left, x_rest, y_rest);
        }
    }
}

// Scores of a 16 x 16 tile, or what a piece adds to them, into the layout of C: [columns 0-7, 8-15][4].
__device__ __forceinline__ void score_tile(const unsigned char *keys, const unsigned char *terms,
                                           float (&scores)[2][4]) {
    const int lane = threadIdx.x & 31;
    // K as B: matrices (tokens 0-7 | 8-15) x (dimensions 0-7 | 8-15), dimensions first.
    const unsigned char *key = keys + ((lane & 7) + (lane >> 4) * 8) * ROW_BYTES + (lane >> 3 & 1) * 16;
    const unsigned char *high = terms + (lane & 15) * QUERY_BYTES + (lane >> 4) * 16;
#pragma unroll
    for (int step = 0; step < PIECE_STEPS; step++) {
        unsigned b[4], a[4];
        load_matrices(b, key + step * 32);
        load_matrices(a, high + step * 32);
        multiply_add(scores[0], a, b[0], b[1]);
        multiply_add(scores[1], a, b[2], b[3]);
        load_matrices(a, high + ROWS * QUERY_BYTES + step * 32);
        multiply_add(scores[0], a, b[0], b[1]);
        multiply_add(scores[1], a, b[2], b[3]);
    }
}

// Scores become weights in place; maxima and sums are brought up to date, accumulators scaled.
__device__ __forceinline__ void soften(float (&scores)[2][4], const float (&factor)[2], const Sight (&sights)[2],
                                       int token0, Scoring scoring, TileState &state) {
    const int column = 2 * (threadIdx.x & 3);
#pragma unroll
    for (int h = 0; h < 2; h++) { // rows g and g + 8
        float highest = NEG_INF;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = token0 + column + (i >> 1) * 8 + (i & 1);
            float &score = scores[i >> 1][2 * h + (i & 1)];
            const bool seen = token >= sights[h].first && token <= sights[h].last;
            score = seen ? score_of(score * factor[h], scoring) : NEG_INF;
            highest = fmaxf(highest, score);
        }
        highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, 2));
        const float maximum = fmaxf(state.maximum[h], highest), kept = decay(state.maximum[h], maximum);
        float total[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &score = scores[i >> 1][2 * h + (i & 1)];
            score = score == NEG_INF ? 0.f : exp2f(score - maximum); // a NaN score makes a NaN weight
            total[i >> 1] += score;
        }
        state.maximum[h] = maximum;
        state.sum[h] = fmaf(state.sum[h], kept, total[0] + total[1]);
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++) {
            state.weighted[n][2 * h] *= kept;
            state.weighted[n][2 * h + 1] *= kept;
        }
    }
}

// weighted += weights . V of a slice, in the dimensions of a piece. V as B: matrices (tokens 0-7 | 8-15) x
// (dimensions 0-7 | 8-15), transposed.
// FINITE: infinities and NaN of V are taken as zeros; `add_others` brings them in.
template <bool FINITE>
__device__ __forceinline__ void weigh_tile(const unsigned char *values, int piece, const float (&weights)[2][4],
                                           TileState &state) {
    const int lane = threadIdx.x & 31;
    unsigned high[4], low[4];
    float left[2][4], rest[2];
#pragma unroll
    for (int i = 0; i < 4; i++) { // the layout of C, two tiles of columns, is that of A
        const int tile = i >> 1, at = 2 * (i & 1);
        high[i] = pack_pair(weights[tile][at], weights[tile][at + 1], left[tile][at], left[tile][at + 1]);
        low[i] = pack_pair(left[tile][at], left[tile][at + 1], rest[0], rest[1]);
    }
    const unsigned char *value = values + (lane & 15) * ROW_BYTES + (lane >> 4) * 16;
#pragma unroll
    for (int i = 0; i < PIECE_STEPS; i++) {
        const int step = piece * PIECE_STEPS + i;
        unsigned b[4];
        load_matrices_transposed(b, value + i * 32);
        if (FINITE) {
#pragma unroll
            for (int j = 0; j < 4; j++) b[j] = finite_pair(b[j]);
        }
        multiply_add(state.weighted[2 * step], high, b[0], b[1]);
        multiply_add(state.weighted[2 * step], low, b[0], b[1]);
        multiply_add(state.weighted[2 * step + 1], high, b[2], b[3]);
        multiply_add(state.weighted[2 * step + 1], low, b[2], b[3]);
    }
}

// Whether a piece of a slice of V has an infinity or a NaN; the same answer in all lanes.
__device__ __forceinline__ bool has_others(const unsigned char *values) {
    const int lane = threadIdx.x & 31;
    bool found = false;
    for (int i = lane; i < 16 * (PIECE_DIMS / 2); i += 32) {
        const int token = i / (PIECE_DIMS / 2), pair = i % (PIECE_DIMS / 2);
        const unsigned bits = *reinterpret_cast<const unsigned *>(values + token * ROW_BYTES + pair * 4);
        found |= finite_pair(bits) != bits;
    }
    return __any_sync(FULL_MASK, found);
}

// Infinities and NaN of a piece of V reach the rows that see their token, and no other: rare, and therefore slow.
__device__ __forceinline__ void add_others(const unsigned char *values, int piece, const float (&weights)[2][4],
                                           const Sight (&sights)[2], int token0, TileState &state) {
    const int lane = threadIdx.x & 31;
#pragma unroll 1
    for (int token = 0; token < 16; token++) {
        const int owner = (lane & ~3) | (token & 7) >> 1;
        float weight[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float even = token < 8 ? weights[0][2 * h] : weights[1][2 * h];
            const float odd = token < 8 ? weights[0][2 * h + 1] : weights[1][2 * h + 1];
            weight[h] = __shfl_sync(FULL_MASK, token & 1 ? odd : even, owner);
        }
        const stored_t *row = reinterpret_cast<const stored_t *>(values + token * ROW_BYTES);
#pragma unroll
        for (int n = 0; n < 2 * PIECE_STEPS; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float &weighted = state.weighted[2 * piece * PIECE_STEPS + n][j];
                const float value = to_float(row[8 * n + 2 * (lane & 3) + (j & 1)]);
                const Sight sight = sights[j >> 1];
                const bool other = value - value != 0.f;
                if (other && token0 + token >= sight.first && token0 + token <= sight.last)
                    weighted = fmaf(weight[j >> 1], value, weighted);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
paged_attention_tensor(const int *__restrict__ items, const int *__restrict__ num_items,
                       const int *__restrict__ tokens, const int *__restrict__ positions,
                       const int *__restrict__ state_starts, const int *__restrict__ state_counts,
                       const int *__restrict__ tables, int table_width, const float *__restrict__ query,
                       long long query_stride, const stored_t *__restrict__ pool0, const stored_t *__restrict__ pool1,
                       const stored_t *__restrict__ pool2, const stored_t *__restrict__ pool3, long long block_stride,
                       long long layer_offset, long long kv_stride, long long head_stride, int block_size,
                       float *__restrict__ out, long long out_stride, float *__restrict__ state_values,
                       float *__restrict__ state_scalars, const float *__restrict__ sinks, int group, int window,
                       float scale, float cap) {
    extern __shared__ __align__(16) unsigned char shared[];
    // The ring comes first; at an item's end the same memory holds the merged slices, [ROWS][DIMS] floats.
    unsigned char *ring = shared;
    float *merged = reinterpret_cast<float *>(shared);
    const int overlay = max(BUFFERS * STAGE_BYTES, ROWS * DIMS * 4);
    unsigned char *terms = shared + overlay; // of the queries, [2][ROWS]
    const stored_t **blocks = reinterpret_cast<const stored_t **>(terms + 2 * ROWS * QUERY_BYTES);
    __shared__ Sight sights[ROWS];
    __shared__ float factors[ROWS], maxima[SLICES][ROWS], sums[SLICES][ROWS];

    const Cache cache = {pool0, pool1, pool2, pool3, block_stride, layer_offset, kv_stride, head_stride, block_size};
    const Scoring scoring = {scale, cap};
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, slice = warp % SLICES, tile_row0 = warp / SLICES * 16;
    const int kv_head = blockIdx.y, heads = gridDim.y * group;
    clear_padding(ring);

    for (int index = blockIdx.x; index < *num_items; index += gridDim.x) {
        const WorkItem item = reinterpret_cast<const WorkItem *>(items)[index];
        const int tile0 = item.low / TILE * TILE, halves = 2 * ((item.high - tile0 + TILE - 1) / TILE);
        resolve_blocks(cache, tables + (long long)item.table * table_width, kv_head, item.low, item.high, blocks);
        load_queries(item, query, query_stride, tokens, group, kv_head, terms, factors);
        if (threadIdx.x < ROWS) {
            Sight sight = {0, -1}; // rows beyond the item's see nothing
            if (threadIdx.x < item.num_rows)
                sight = sight_of(positions[tokens[(item.first_row + threadIdx.x) / group]], window);
            sights[threadIdx.x] = sight;
        }
        __syncthreads();

        // Tokens all_from..all_to are seen by every row of this warp's tile.
        int all_from = 0, all_to = item.high;
        for (int r = tile_row0; r < min(tile_row0 + 16, item.num_rows); r++) {
            all_from = max(all_from, sights[r].first);
            all_to = min(all_to, sights[r].last);
        }
        const Sight own[2] = {sights[tile_row0 + (lane >> 2)], sights[tile_row0 + (lane >> 2) + 8]};
        const float factor[2] = {factors[tile_row0 + (lane >> 2)], factors[tile_row0 + (lane >> 2) + 8]};
        TileState state;
        float weights[2][4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            state.maximum[h] = NEG_INF;
            state.sum[h] = 0.f;
        }
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) state.weighted[n][i] = 0.f;

        for (int stage = 0; stage < BUFFERS - 1; stage++)
            if (stage < halves * PIECES)
                load_stage(cache, blocks, stage, tile0, item.low, item.high, ring + stage * STAGE_BYTES);
            else copies_commit(); // groups are counted, empty ones too
        for (int half = 0; half < halves; half++) {
#pragma unroll
            for (int piece = 0; piece < PIECES; piece++) {
                copies_wait<BUFFERS - 2>();
                __syncthreads(); // everybody's copies of this stage are there, and the stage before is done with
                const int stage = half * PIECES + piece, next = stage + BUFFERS - 1;
                if (next < halves * PIECES)
                    load_stage(cache, blocks, next, tile0, item.low, item.high, ring + next % BUFFERS * STAGE_BYTES);
                else copies_commit();
                const unsigned char *stored = ring + stage % BUFFERS * STAGE_BYTES + slice * 16 * ROW_BYTES;
                const int token0 = tile0 + (half >> 1) * TILE + slice * 16;
                if (half & 1) {
                    const bool mixed = max(token0, item.low) < all_from || min(token0 + 16, item.high) - 1 > all_to;
                    if (mixed && has_others(stored)) {
                        weigh_tile<true>(stored, piece, weights, state);
                        add_others(stored, piece, weights, own, token0, state);
                    } else
                        weigh_tile<false>(stored, piece, weights, state);
                } else {
                    if (piece == 0) {
#pragma unroll
                        for (int i = 0; i < 4; i++) weights[0][i] = weights[1][i] = 0.f;
                    }
                    score_tile(stored, terms + tile_row0 * QUERY_BYTES + piece * PIECE_DIMS * 2, weights);
                    if (piece == PIECES - 1) soften(weights, factor, own, token0, scoring, state);
                }
            }
        }
        __syncthreads(); // the ring is done with

#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = state.sum[h] + __shfl_xor_sync(FULL_MASK, state.sum[h], 1);
            sum += __shfl_xor_sync(FULL_MASK, sum, 2);
            if ((lane & 3) == 0) {
                maxima[slice][tile_row0 + (lane >> 2) + 8 * h] = state.maximum[h];
                sums[slice][tile_row0 + (lane >> 2) + 8 * h] = sum;
            }
        }
        __syncthreads();
        for (int s = 0; s < SLICES; s++) { // one slice after the other adds its part
            if (slice == s) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const int r = tile_row0 + (lane >> 2) + 8 * h;
                    float maximum = maxima[0][r];
                    for (int i = 1; i < SLICES; i++) maximum = fmaxf(maximum, maxima[i][r]);
                    const float kept = decay(maxima[s][r], maximum);
#pragma unroll
                    for (int n = 0; n < 2 * STEPS; n++) {
                        float2 *at = reinterpret_cast<float2 *>(merged + r * DIMS + 8 * n + 2 * (lane & 3));
                        const float2 before = s ? *at : make_float2(0.f, 0.f);
                        *at = make_float2(fmaf(state.weighted[n][2 * h], kept, before.x),
                                          fmaf(state.weighted[n][2 * h + 1], kept, before.y));
                    }
                }
            }
            __syncthreads();
        }
        for (int i = threadIdx.x; i < item.num_rows * HEAD_DIM; i += THREADS) {
            const int r = i / HEAD_DIM, dim = i % HEAD_DIM;
            float maximum = maxima[0][r], sum = 0.f;
            for (int s = 1; s < SLICES; s++) maximum = fmaxf(maximum, maxima[s][r]);
            for (int s = 0; s < SLICES; s++) sum = fmaf(sums[s][r], decay(maxima[s][r], maximum), sum);
            write_row(item, r, dim, kv_head, group, heads, tokens, positions, window, state_starts, state_counts,
                      maximum, sum, merged[r * DIMS + dim], out, out_stride, state_values, state_scalars, sinks);
        }
        __syncthreads(); // before the next item overwrites what this one reads
        if (HEAD_DIM != DIMS) clear_padding(ring);
    }
}
