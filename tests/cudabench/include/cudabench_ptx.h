// Inline PTX: translate.py turns `asm("add.s32 %0, %1, %2;" ...)` into calls of these, one per instruction, with the
// operands in the order of the instruction's text. So a swapped operand in the text is a swapped operand here.
// A name is the mnemonic with dots as underscores, less the qualifiers that change no value (IGNORED in translate.py).
#pragma once
namespace cudabench {

#define CUDABENCH_MMA16(name, bf)                                                                                      \
    inline void name(const char *where, float &d0, float &d1, float &d2, float &d3, unsigned a0, unsigned a1,          \
                     unsigned a2, unsigned a3, unsigned b0, unsigned b1, float c0, float c1, float c2, float c3) {     \
        const unsigned a[] = {a0, a1, a2, a3}, b[] = {b0, b1};                                                         \
        const float c[] = {c0, c1, c2, c3};                                                                            \
        float d[4];                                                                                                    \
        mma(where, d, a, b, c, 16, bf);                                                                                \
        d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                                                    \
    }
#define CUDABENCH_MMA8(name, bf)                                                                                       \
    inline void name(const char *where, float &d0, float &d1, float &d2, float &d3, unsigned a0, unsigned a1,          \
                     unsigned b0, float c0, float c1, float c2, float c3) {                                            \
        const unsigned a[] = {a0, a1}, b[] = {b0};                                                                     \
        const float c[] = {c0, c1, c2, c3};                                                                            \
        float d[4];                                                                                                    \
        mma(where, d, a, b, c, 8, bf);                                                                                 \
        d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                                                    \
    }
CUDABENCH_MMA16(ptx_mma_m16n8k16_row_col_f32_f16_f16_f32, false)
CUDABENCH_MMA16(ptx_mma_m16n8k16_row_col_f32_bf16_bf16_f32, true)
CUDABENCH_MMA8(ptx_mma_m16n8k8_row_col_f32_f16_f16_f32, false)
CUDABENCH_MMA8(ptx_mma_m16n8k8_row_col_f32_bf16_bf16_f32, true)

#define CUDABENCH_LDMATRIX(suffix, transposed)                                                                         \
    inline void ptx_ldmatrix_m8n8_x1##suffix(const char *where, unsigned &d0, unsigned row) {                          \
        ldmatrix(where, &d0, shared_pointer(where, row), 1, transposed);                                               \
    }                                                                                                                  \
    inline void ptx_ldmatrix_m8n8_x2##suffix(const char *where, unsigned &d0, unsigned &d1, unsigned row) {            \
        unsigned d[2];                                                                                                 \
        ldmatrix(where, d, shared_pointer(where, row), 2, transposed);                                                 \
        d0 = d[0], d1 = d[1];                                                                                          \
    }                                                                                                                  \
    inline void ptx_ldmatrix_m8n8_x4##suffix(const char *where, unsigned &d0, unsigned &d1, unsigned &d2,              \
                                             unsigned &d3, unsigned row) {                                             \
        unsigned d[4];                                                                                                 \
        ldmatrix(where, d, shared_pointer(where, row), 4, transposed);                                                 \
        d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                                                    \
    }
CUDABENCH_LDMATRIX(_shared_b16, false)
CUDABENCH_LDMATRIX(_trans_shared_b16, true)

inline void ptx_cp_async_cg_shared_global(const char *where, unsigned to, const void *from, int bytes) {
    if (bytes != 16) fault(where, "cp.async.cg copies 16 bytes, no other number");
    async_copy(where, shared_pointer(where, to), from, bytes, bytes);
}
inline void ptx_cp_async_cg_shared_global(const char *where, unsigned to, const void *from, int bytes, int source) {
    if (bytes != 16) fault(where, "cp.async.cg copies 16 bytes, no other number");
    async_copy(where, shared_pointer(where, to), from, bytes, source);
}
inline void ptx_cp_async_ca_shared_global(const char *where, unsigned to, const void *from, int bytes) {
    async_copy(where, shared_pointer(where, to), from, bytes, bytes);
}
inline void ptx_cp_async_ca_shared_global(const char *where, unsigned to, const void *from, int bytes, int source) {
    async_copy(where, shared_pointer(where, to), from, bytes, source);
}
// Operands of asm may be integers that hold addresses.
inline void ptx_cp_async_cg_shared_global(const char *where, unsigned to, size_t from, int bytes, int source = 16) {
    ptx_cp_async_cg_shared_global(where, to, (const void *)from, bytes, source);
}
inline void ptx_cp_async_commit_group(const char *) { async_commit(); }
inline void ptx_cp_async_wait_group(const char *, int groups) { async_wait(groups); }
inline void ptx_cp_async_wait_all(const char *) {
    async_commit();
    async_wait(0);
}

template <class T> inline void ptx_ex2_approx_f32(const char *, T &d, float a) { d = exp2f(a); }
template <class T> inline void ptx_lg2_approx_f32(const char *, T &d, float a) { d = log2f(a); }
template <class T> inline void ptx_rcp_approx_f32(const char *, T &d, float a) { d = 1.f / a; }
template <class T> inline void ptx_sqrt_approx_f32(const char *, T &d, float a) { d = sqrtf(a); }
template <class T> inline void ptx_rsqrt_approx_f32(const char *, T &d, float a) { d = 1.f / sqrtf(a); }
template <class T> inline void ptx_tanh_approx_f32(const char *, T &d, float a) { d = tanhf(a); }
template <class T> inline void ptx_mov_u32(const char *, T &d, unsigned a) { d = a; }
template <class T> inline void ptx_mov_b32(const char *, T &d, unsigned a) { d = a; }
template <class T> inline void ptx_prmt_b32(const char *, T &d, unsigned a, unsigned b, unsigned c) {
    d = cudabench_prmt(a, b, c);
}
template <class T> inline void ptx_lop3_b32(const char *, T &d, unsigned a, unsigned b, unsigned c, unsigned table) {
    unsigned out = 0;
    for (int i = 0; i < 8; i++)
        if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    d = out;
}
// cvt.rn.*x2.f32 d, a, b: a becomes the upper half (PTX ISA, cvt)
uint16_t narrow_half(float f);
uint16_t narrow_bfloat16(float f);
template <class T> inline void ptx_cvt_rn_f16x2_f32(const char *, T &d, float a, float b) {
    d = (unsigned)narrow_half(a) << 16 | narrow_half(b);
}
template <class T> inline void ptx_cvt_rn_bf16x2_f32(const char *, T &d, float a, float b) {
    d = (unsigned)narrow_bfloat16(a) << 16 | narrow_bfloat16(b);
}
inline void ptx_setp_ne_b32(const char *, bool &d, unsigned a, unsigned b) { d = a != b; }
inline void ptx_setp_ne_s32(const char *, bool &d, int a, int b) { d = a != b; }
inline void ptx_setp_ne_u32(const char *, bool &d, unsigned a, unsigned b) { d = a != b; }

#define CUDABENCH_LOADS(type, T)                                                                                       \
    template <class D, class P> inline void ptx_ld_global_##type(const char *, D &d, P from) {                         \
        d = cudabench_bits<D>(*(const T *)from);                                                                       \
    }                                                                                                                  \
    template <class V, class P> inline void ptx_st_global_##type(const char *, P to, V v) {                            \
        *(T *)to = cudabench_bits<T>(v);                                                                               \
    }
CUDABENCH_LOADS(u32, unsigned)
CUDABENCH_LOADS(s32, int)
CUDABENCH_LOADS(b32, unsigned)
CUDABENCH_LOADS(f32, float)
template <class D, class P> inline void ptx_ld_global_v4_u32(const char *, D &a, D &b, D &c, D &d, P from) {
    const uint4 v = *(const uint4 *)from;
    a = cudabench_bits<D>(v.x), b = cudabench_bits<D>(v.y), c = cudabench_bits<D>(v.z), d = cudabench_bits<D>(v.w);
}
template <class D, class P> inline void ptx_ld_global_v4_b32(const char *w, D &a, D &b, D &c, D &d, P from) {
    ptx_ld_global_v4_u32(w, a, b, c, d, from);
}
template <class D, class P> inline void ptx_ld_global_v4_f32(const char *w, D &a, D &b, D &c, D &d, P from) {
    ptx_ld_global_v4_u32(w, a, b, c, d, from);
}

} // namespace cudabench
