// From logits to tokens, as cupaged/kernels/reference/sampling.py says step by step: three kernels,
// and one that looks for what is not finite.
//
// sample_max: grid (rows): the largest logit and its lowest id. sample_weights: grid (rows, V / 1024): exp((l - max) /
// temperature) in float64, spread over the GPU because float64 is slow on most. sample_select: grid (rows): top-k and
// top-p by radix selection, min-p, the draw. All 256 threads, and every sum in one fixed order: a token does not depend
// on its company or on the order of atomics (there are none).
//
// Bytes: a row's logits once for the maximum, once for the weights, and up to 16 times (from L2) each for top-k and
// top-p, 8 bytes of weight beside; float64 operations: one exp a logit. Roof: L2 bandwidth of one multiprocessor a row.
// Selecting with several blocks a row was left out: rows of a batch already fill the GPU.
#include "common.cuh"

#define THREADS 256
#define GREEDY_BELOW 1e-5
#define TOP_P_SLACK 1e-12

// Settings of a row; sampling.py packs them as six 8-byte words.
struct RowSettings {
    double temperature, top_p, min_p;
    unsigned long long seed, position;
    unsigned sample;
    int top_k;
};

extern "C" __global__ void __launch_bounds__(THREADS)
sample_max(const float *__restrict__ logits, int *__restrict__ best, float *__restrict__ maxima, int vocabulary) {
    __shared__ float values[THREADS];
    __shared__ int ids[THREADS];
    const float *row = logits + (long long)blockIdx.x * vocabulary;
    float value = NEG_INF;
    int id = vocabulary; // none yet
    for (int i = threadIdx.x; i < vocabulary; i += THREADS)
        if (row[i] > value || id == vocabulary) {
            value = row[i];
            id = i;
        }
    values[threadIdx.x] = value;
    ids[threadIdx.x] = id;
    for (int half = THREADS / 2; half; half >>= 1) {
        __syncthreads();
        if (threadIdx.x < half) {
            const int other = threadIdx.x + half;
            if (ids[other] < vocabulary && (values[other] > values[threadIdx.x] ||
                                            (values[other] == values[threadIdx.x] && ids[other] < ids[threadIdx.x]))) {
                values[threadIdx.x] = values[other];
                ids[threadIdx.x] = ids[other];
            }
        }
    }
    if (threadIdx.x == 0) {
        best[blockIdx.x] = ids[0];
        maxima[blockIdx.x] = values[0];
    }
}

// flags[row] = 1 if the row holds NaN or infinity, else 0. grid (rows). Bytes: a row's logits once.
extern "C" __global__ void __launch_bounds__(THREADS)
sample_broken(const float *__restrict__ logits, int *__restrict__ flags, int vocabulary) {
    __shared__ int found[THREADS];
    const float *row = logits + (long long)blockIdx.x * vocabulary;
    int broken = 0;
    for (int i = threadIdx.x; i < vocabulary; i += THREADS)
        broken |= (__float_as_uint(row[i]) & 0x7f800000u) == 0x7f800000u;
    found[threadIdx.x] = broken;
    for (int half = THREADS / 2; half; half >>= 1) {
        __syncthreads();
        if (threadIdx.x < half) found[threadIdx.x] |= found[threadIdx.x + half];
    }
    if (threadIdx.x == 0) flags[blockIdx.x] = found[0];
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_weights(const float *__restrict__ logits, const float *__restrict__ maxima,
               const unsigned char *__restrict__ settings, double *__restrict__ weights, int vocabulary) {
    const double temperature = reinterpret_cast<const RowSettings *>(settings)[blockIdx.x].temperature;
    if (temperature < GREEDY_BELOW) return;
    const long long row = (long long)blockIdx.x * vocabulary;
    const double highest = maxima[blockIdx.x];
    for (int j = 0; j < 4; j++) {
        const int i = (blockIdx.y * 4 + j) * THREADS + threadIdx.x;
        if (i < vocabulary) weights[row + i] = exp(((double)logits[row + i] - highest) / temperature);
    }
}

// Unsigned order of keys is the order of logits; -0 and 0 are one.
__device__ __forceinline__ unsigned key_of(float logit) {
    const unsigned bits = __float_as_uint(logit + 0.f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What a cut keeps: larger keys, and of equal ones those up to an id.
struct Cut {
    unsigned key;
    int last;
};
__device__ __forceinline__ bool keeps(Cut cut, unsigned key, int id) {
    return key > cut.key || (key == cut.key && id <= cut.last);
}

struct Scratch {
    double bins[16][THREADS + 1]; // a column a thread; rows a bank apart
    double totals[16];
    int counts[THREADS];
    int found;
};

// The shortest prefix, in descending logit and ascending id, of what `within` keeps whose mass reaches `target`; at
// least one. Mass: 1 a token (top-k), or its weight. Eight digits of 4 bits, from the top; the mass of a digit is summed
// by thread, then over threads in order.
__device__ Cut shortest_prefix(const float *logits, const double *weights, int vocabulary, Cut within, bool counted,
                               double target, Scratch &scratch) {
    unsigned prefix = 0, mask = 0;
    double above = 0.0;
    for (int shift = 28; shift >= 0; shift -= 4) {
        for (int digit = 0; digit < 16; digit++) scratch.bins[digit][threadIdx.x] = 0.0;
        for (int i = threadIdx.x; i < vocabulary; i += THREADS) {
            const unsigned key = key_of(logits[i]);
            if ((key & mask) == prefix && keeps(within, key, i))
                scratch.bins[key >> shift & 15][threadIdx.x] += counted ? 1.0 : weights[i];
        }
        __syncthreads();
        if (threadIdx.x < 16) {
            double total = 0.0;
            for (int t = 0; t < THREADS; t++) total += scratch.bins[threadIdx.x][t];
            scratch.totals[threadIdx.x] = total;
        }
        __syncthreads();
        int chosen = -1, lowest = 0;
        double before = above, before_lowest = above;
        for (int digit = 15; digit >= 0 && chosen < 0; digit--) {
            const double total = scratch.totals[digit];
            if (total > 0.0) {
                lowest = digit;
                before_lowest = before;
                if (before + total >= target) chosen = digit;
                else before += total;
            }
        }
        if (chosen < 0) { // the digits' sums fell short by a rounding: all of them, then
            chosen = lowest;
            before = before_lowest;
        }
        above = before;
        prefix |= (unsigned)chosen << shift;
        mask |= 15u << shift;
    }
    // Of the keys equal to the cut, the first `needed` by id. They all have one weight.
    const int chunk = (vocabulary + THREADS - 1) / THREADS;
    const int first = min(vocabulary, (int)threadIdx.x * chunk), end = min(vocabulary, first + chunk);
    int count = 0;
    double mass = 1.0;
    for (int i = first; i < end; i++) {
        const unsigned key = key_of(logits[i]);
        if (key == prefix && keeps(within, key, i)) {
            count++;
            if (!counted) mass = weights[i];
        }
    }
    scratch.counts[threadIdx.x] = count;
    if (threadIdx.x == 0) scratch.found = vocabulary;
    __syncthreads();
    int earlier = 0;
    for (int t = 0; t < (int)threadIdx.x; t++) earlier += scratch.counts[t];
    if (count) {
        const double wanted = mass > 0.0 ? ceil((target - above) / mass) : 1.0;
        const double needed = wanted < 1.0 ? 1.0 : wanted;
        if (earlier < needed && needed <= (double)(earlier + count)) {
            int left = (int)needed - earlier, i = first;
            for (;; i++) {
                const unsigned key = key_of(logits[i]);
                if (key == prefix && keeps(within, key, i) && --left == 0) break;
            }
            scratch.found = i;
        }
    }
    __syncthreads();
    const Cut cut = {prefix, scratch.found};
    __syncthreads();
    return cut;
}

// Philox4x32-10 (Salmon et al. 2011), as cupaged/kernels/philox.py has it: the number in (0, 1) of one draw.
__device__ double uniform_of(unsigned long long seed, unsigned sample, unsigned long long position) {
    unsigned c0 = (unsigned)position, c1 = (unsigned)(position >> 32), c2 = sample, c3 = 0;
    unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const unsigned long long p0 = (unsigned long long)c0 * 0xD2511F53u, p1 = (unsigned long long)c2 * 0xCD9E8D57u;
        const unsigned n0 = (unsigned)(p1 >> 32) ^ c1 ^ k0, n2 = (unsigned)(p0 >> 32) ^ c3 ^ k1;
        c1 = (unsigned)p1;
        c3 = (unsigned)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const unsigned long long bits = (unsigned long long)c0 << 20 | c1 >> 12;
    return ((double)bits + 0.5) * 2.220446049250313e-16; // 2^-52
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_select(const float *__restrict__ logits, const double *__restrict__ weights, const int *__restrict__ best,
              const unsigned char *__restrict__ settings, int *__restrict__ tokens, int vocabulary) {
    __shared__ Scratch scratch;
    __shared__ double sums[THREADS];
    const RowSettings row = reinterpret_cast<const RowSettings *>(settings)[blockIdx.x];
    if (row.temperature < GREEDY_BELOW) { // the same for all threads
        if (threadIdx.x == 0) tokens[blockIdx.x] = best[blockIdx.x];
        return;
    }
    const float *l = logits + (long long)blockIdx.x * vocabulary;
    const double *w = weights + (long long)blockIdx.x * vocabulary;
    const Cut all = {0, vocabulary};
    Cut by_count = all, by_mass = all;
    if (row.top_k > 0 && row.top_k < vocabulary)
        by_count = shortest_prefix(l, w, vocabulary, all, true, (double)row.top_k, scratch);
    const int chunk = (vocabulary + THREADS - 1) / THREADS;
    const int first = min(vocabulary, (int)threadIdx.x * chunk), end = min(vocabulary, first + chunk);
    if (row.top_p < 1.0) {
        double sum = 0.0;
        for (int i = first; i < end; i++)
            if (keeps(by_count, key_of(l[i]), i)) sum += w[i];
        sums[threadIdx.x] = sum;
        __syncthreads();
        double total = 0.0;
        for (int t = 0; t < THREADS; t++) total += sums[t];
        const double target = (row.top_p - TOP_P_SLACK) * total;
        by_mass = shortest_prefix(l, w, vocabulary, by_count, false, target > 0.0 ? target : 1e-300, scratch);
    }
    double sum = 0.0;
    for (int i = first; i < end; i++) {
        const unsigned key = key_of(l[i]);
        if (keeps(by_count, key, i) && keeps(by_mass, key, i) && w[i] >= row.min_p) sum += w[i];
    }
    __syncthreads(); // sums may still be read for top_p
    sums[threadIdx.x] = sum;
    __syncthreads();
    double total = 0.0, before = 0.0;
    for (int t = 0; t < THREADS; t++) {
        if (t == (int)threadIdx.x) before = total;
        total += sums[t];
    }
    const double threshold = uniform_of(row.seed, row.sample, row.position) * total;
    if (before <= threshold && before + sum > threshold) { // exactly one thread's share
        double running = before;
        int token = -1;
        for (int i = first; i < end; i++) {
            const unsigned key = key_of(l[i]);
            if (keeps(by_count, key, i) && keeps(by_mass, key, i) && w[i] >= row.min_p) {
                if (w[i] > 0.0) token = i; // the last one, should the share's sum have been rounded up
                running += w[i];
                if (running > threshold) break;
            }
        }
        tokens[blockIdx.x] = token;
    }
}
