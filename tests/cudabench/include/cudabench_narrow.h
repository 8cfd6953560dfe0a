// Arithmetic of a 16-bit type; included once for each, with CUDABENCH_T and CUDABENCH_T2 set. No include guard.
static inline CUDABENCH_T operator+(CUDABENCH_T a, CUDABENCH_T b) { return CUDABENCH_T((float)a + (float)b); }
static inline CUDABENCH_T operator-(CUDABENCH_T a, CUDABENCH_T b) { return CUDABENCH_T((float)a - (float)b); }
static inline CUDABENCH_T operator*(CUDABENCH_T a, CUDABENCH_T b) { return CUDABENCH_T((float)a * (float)b); }
static inline CUDABENCH_T operator/(CUDABENCH_T a, CUDABENCH_T b) { return CUDABENCH_T((float)a / (float)b); }
static inline CUDABENCH_T operator-(CUDABENCH_T a) { return CUDABENCH_T(-(float)a); }
static inline bool operator<(CUDABENCH_T a, CUDABENCH_T b) { return (float)a < (float)b; }
static inline bool operator>(CUDABENCH_T a, CUDABENCH_T b) { return (float)a > (float)b; }
static inline CUDABENCH_T __hadd(CUDABENCH_T a, CUDABENCH_T b) { return a + b; }
static inline CUDABENCH_T __hsub(CUDABENCH_T a, CUDABENCH_T b) { return a - b; }
static inline CUDABENCH_T __hmul(CUDABENCH_T a, CUDABENCH_T b) { return a * b; }
static inline CUDABENCH_T __hmax(CUDABENCH_T a, CUDABENCH_T b) { return CUDABENCH_T(fmaxf((float)a, (float)b)); }
static inline CUDABENCH_T __hmin(CUDABENCH_T a, CUDABENCH_T b) { return CUDABENCH_T(fminf((float)a, (float)b)); }
static inline CUDABENCH_T __hfma(CUDABENCH_T a, CUDABENCH_T b, CUDABENCH_T c) {
    // the product is exact in double; its sum with c rounds there once before it rounds to 16 bits
    return CUDABENCH_T((float)((double)(float)a * (double)(float)b + (double)(float)c));
}
static inline CUDABENCH_T2 __hadd2(CUDABENCH_T2 a, CUDABENCH_T2 b) { return {a.x + b.x, a.y + b.y}; }
static inline CUDABENCH_T2 __hsub2(CUDABENCH_T2 a, CUDABENCH_T2 b) { return {a.x - b.x, a.y - b.y}; }
static inline CUDABENCH_T2 __hmul2(CUDABENCH_T2 a, CUDABENCH_T2 b) { return {a.x * b.x, a.y * b.y}; }
static inline CUDABENCH_T2 __hfma2(CUDABENCH_T2 a, CUDABENCH_T2 b, CUDABENCH_T2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
