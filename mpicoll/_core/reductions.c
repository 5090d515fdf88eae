/* Element-wise reductions: see reductions.h.
 *
 * One row of DTYPES defines a dtype, one row of a ..._OPS table an operation. Each cell of the grid
 * is a handful of small loops over a tile (begin, step, end); the drivers at the end of the file
 * walk the buffers tile by tile, so the accumulator stays in the first-level cache and the output
 * is written only after all inputs of a tile were read. */

/* A fused multiply-add in the complex product would make results depend on the target. GCC does
 * not know the standard pragma and contracts by default in its gnu modes; there, also say that
 * nobody looks at the floating-point exception flags, or selections would not vectorise. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off", "no-trapping-math")
#elif defined(_MSC_VER)
#pragma fp_contract(off)
#else
#pragma STDC FP_CONTRACT OFF
#endif

#include "reductions.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "reductions.c needs NaN, infinities and signed zeros: compile it without -ffast-math"
#endif

enum { TILE = 256 }; /* elements; even, so that no (value, index) pair is split */

/* ---- 16-bit floats ------------------------------------------------------------------------- */
/* Written as selections between unconditional computations, so that the loops vectorise. */

static inline uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

static inline uint16_t to_bf16(float f) {
    const uint32_t u = bits_of(f);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16; /* carries into inf */
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static inline float from_f16(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13;
    const uint32_t normal = magnitude + (112u << 23);  /* exponent bias 15 -> 127 */
    const uint32_t special = magnitude + (224u << 23); /* inf and NaN: exponent 31 -> 255 */
    /* A subnormal is the fraction of a number in [2^-14, 2^-13): subtracting 2^-14 normalises it,
     * without ever forming a subnormal float32 (which a thread may have set to flush to zero). */
    const uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - 0x1p-14f);
    const uint32_t small = magnitude < (1u << 23) ? subnormal : normal;
    return float_of(sign | (magnitude >= (31u << 23) ? special : small));
}

static inline uint16_t to_f16(float f) {
    const uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
    const uint32_t odd = (magnitude >> 13) & 1u;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13; /* carries into inf */
    /* Below 2^-14 the spacing is 2^-24, which is that of float32 in [0.5, 1): the addition rounds
     * to it, and the result's low bits are the float16. */
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - (126u << 23);
    const uint32_t small = magnitude < (113u << 23) ? subnormal : normal;
    const uint32_t finite = sign | (magnitude >= (143u << 23) ? 0x7c00u : small);
    return (uint16_t)(magnitude > 0x7f800000u ? 0x7e00u : finite);
}

/* ---- complex numbers ----------------------------------------------------------------------- */
/* Structures instead of C's complex types, whose product repairs infinities and is a call. */

/* GCC's vectoriser fuses a complex product (vfmaddsub) even where contraction is off: keep it from
 * seeing the difference and the sum as one vector. */
#if defined(__GNUC__) && !defined(__clang__)
#define NOT_FUSED(x) __asm__("" : "+m"(x))
#else
#define NOT_FUSED(x) (void)(x)
#endif

#define COMPLEX_TYPE(type, D, real)                                                                \
    typedef struct {                                                                               \
        real re, im;                                                                               \
    } type;                                                                                        \
    static inline type real_##D(real re) { return (type){re, 0}; }                                 \
    static inline type truth_##D(type x) { return real_##D((x.re != 0) | (x.im != 0)); }           \
    static inline type sum_##D(type a, type b) { return (type){a.re + b.re, a.im + b.im}; }        \
    static inline type product_##D(type a, type b) {                                               \
        real re = a.re * b.re - a.im * b.im;                                                       \
        NOT_FUSED(re);                                                                             \
        return (type){re, a.re * b.im + a.im * b.re};                                              \
    }                                                                                              \
    static inline type quotient_##D(type a, int b) { return (type){a.re / b, a.im / b}; }

COMPLEX_TYPE(c64, C64, float)
COMPLEX_TYPE(c128, C128, double)

/* ---- the dtypes ---------------------------------------------------------------------------- */

#define AS_IS(x) (x)
#define TRUTH(x) ((x) != 0) /* a byte of a bool tensor may hold more than 0 and 1 */

/* "acc" is the type of the accumulator, "wide" that of the arithmetic: unsigned for integers, as
 * signed overflow is undefined and small unsigned types would be promoted to a signed int. Complex
 * has no order, so no range. */
#define DTYPES(X)                                                                                  \
    /*kind     name  stored    acc       wide      load       store    low        high */          \
    X(BOOLEAN, BOOL, uint8_t,  uint8_t,  unsigned, TRUTH,     AS_IS,   0,         1)               \
    X(INTEGER, U8,   uint8_t,  uint8_t,  unsigned, AS_IS,     AS_IS,   0,         UINT8_MAX)       \
    X(INTEGER, I8,   int8_t,   int8_t,   unsigned, AS_IS,     AS_IS,   INT8_MIN,  INT8_MAX)        \
    X(INTEGER, U16,  uint16_t, uint16_t, unsigned, AS_IS,     AS_IS,   0,         UINT16_MAX)      \
    X(INTEGER, I16,  int16_t,  int16_t,  unsigned, AS_IS,     AS_IS,   INT16_MIN, INT16_MAX)       \
    X(INTEGER, U32,  uint32_t, uint32_t, uint32_t, AS_IS,     AS_IS,   0,         UINT32_MAX)      \
    X(INTEGER, I32,  int32_t,  int32_t,  uint32_t, AS_IS,     AS_IS,   INT32_MIN, INT32_MAX)       \
    X(INTEGER, U64,  uint64_t, uint64_t, uint64_t, AS_IS,     AS_IS,   0,         UINT64_MAX)      \
    X(INTEGER, I64,  int64_t,  int64_t,  uint64_t, AS_IS,     AS_IS,   INT64_MIN, INT64_MAX)       \
    X(REAL,    F16,  uint16_t, float,    float,    from_f16,  to_f16,  -INFINITY, INFINITY)        \
    X(REAL,    BF16, uint16_t, float,    float,    from_bf16, to_bf16, -INFINITY, INFINITY)        \
    X(REAL,    F32,  float,    float,    float,    AS_IS,     AS_IS,   -INFINITY, INFINITY)        \
    X(REAL,    F64,  double,   double,   double,   AS_IS,     AS_IS,   -INFINITY, INFINITY)        \
    X(COMPLEX, C64,  c64,      c64,      float,    AS_IS,     AS_IS,   0,         0)               \
    X(COMPLEX, C128, c128,     c128,     double,   AS_IS,     AS_IS,   0,         0)

#define DEFINE_DTYPE(KIND, D, STORED, ACC, WIDE, LOAD, STORE, LOW, HIGH)                           \
    typedef STORED stored_##D;                                                                     \
    typedef ACC acc_##D;                                                                           \
    static inline acc_##D load_##D(stored_##D x) { return LOAD(x); }                               \
    static inline stored_##D store_##D(acc_##D x) { return STORE(x); }
DTYPES(DEFINE_DTYPE)

/* A tile of any dtype, as stored or as accumulated. */
typedef union {
#define TILE_MEMBERS(KIND, D, ...)                                                                 \
    stored_##D stored_of_##D[TILE];                                                                \
    acc_##D acc_of_##D[TILE];
    DTYPES(TILE_MEMBERS)
} tile;

static const size_t stored_sizes[MPICOLL_NDTYPES] = {
#define STORED_SIZE(KIND, D, ...) [MPICOLL_##D] = sizeof(stored_##D),
    DTYPES(STORED_SIZE)
};

/* ---- the operations ------------------------------------------------------------------------ */

#define IS_NAN(x) ((x) != (x))
#define NEVER(x) 0
#define QUIET(x) (IS_NAN(x) ? NAN : (x)) /* the canonical NaN: MAX must not depend on the order */

/* Floats compare equal when their bits are the same or both are zeros: combining the bits gives
 * the greater or lesser zero. A NaN in b is the result because no comparison with it holds. */
#define EXTREME(name, real, bits, better, zero)                                                    \
    static inline real name(real a, real b) {                                                      \
        bits a_bits, b_bits;                                                                       \
        memcpy(&a_bits, &a, sizeof a);                                                             \
        memcpy(&b_bits, &b, sizeof b);                                                             \
        a_bits = a_bits zero b_bits;                                                               \
        real equal, best = a better b ? a : b;                                                     \
        memcpy(&equal, &a_bits, sizeof a);                                                         \
        best = a == b ? equal : best;                                                              \
        return IS_NAN(a) ? a : best;                                                               \
    }
EXTREME(max_float, float, uint32_t, >, &)
EXTREME(min_float, float, uint32_t, <, |)
EXTREME(max_double, double, uint64_t, >, &)
EXTREME(min_double, double, uint64_t, <, |)

/* X(dtype, operation, element x prepared, a combined with b, result v of count rows, neutral)
 * P(dtype, operation, value x prepared, which value is better, NaN test, neutral value, index) */

#define LOGICAL_OPS(X, D)                                                                          \
    X(D, LAND, x != 0, (a != 0) & (b != 0), v, 1)                                                  \
    X(D, LOR,  x != 0, (a != 0) | (b != 0), v, 0)                                                  \
    X(D, LXOR, x != 0, a != b,              v, 0)

#define BITWISE_OPS(X, D, ONES)                                                                    \
    X(D, BAND, x, a & b, v, ONES)                                                                  \
    X(D, BOR,  x, a | b, v, 0)                                                                     \
    X(D, BXOR, x, a ^ b, v, 0)

#define ARITHMETIC_OPS(X, D, WIDE)                                                                 \
    X(D, SUM,  x, (WIDE)a + (WIDE)b, v, 0)                                                         \
    X(D, PROD, x, (WIDE)a * (WIDE)b, v, 1)

#define BOOLEAN_OPS(X, P, D, WIDE, LOW, HIGH)                                                      \
    X(D, MAX,  x, a | b, v, LOW)                                                                   \
    X(D, MIN,  x, a & b, v, HIGH)                                                                  \
    X(D, SUM,  x, a | b, v, 0)                                                                     \
    X(D, PROD, x, a & b, v, 1)                                                                     \
    LOGICAL_OPS(X, D)                                                                              \
    BITWISE_OPS(X, D, 1)

#define INTEGER_OPS(X, P, D, WIDE, LOW, HIGH)                                                      \
    X(D, MAX, x, a > b ? a : b, v, LOW)                                                            \
    X(D, MIN, x, a < b ? a : b, v, HIGH)                                                           \
    ARITHMETIC_OPS(X, D, WIDE)                                                                     \
    LOGICAL_OPS(X, D)                                                                              \
    BITWISE_OPS(X, D, ~(acc_##D)0)                                                                 \
    P(D, MINLOC, x, <, NEVER, HIGH, HIGH)                                                          \
    P(D, MAXLOC, x, >, NEVER, LOW,  HIGH)

#define REAL_OPS(X, P, D, WIDE, LOW, HIGH)                                                         \
    X(D, MAX, QUIET(x), max_##WIDE(a, b), v, LOW)                                                  \
    X(D, MIN, QUIET(x), min_##WIDE(a, b), v, HIGH)                                                 \
    ARITHMETIC_OPS(X, D, WIDE)                                                                     \
    X(D, AVG, x, a + b, v / count, 0)                                                              \
    LOGICAL_OPS(X, D)                                                                              \
    P(D, MINLOC, QUIET(x), <, IS_NAN, HIGH, HIGH)                                                  \
    P(D, MAXLOC, QUIET(x), >, IS_NAN, LOW,  HIGH)

#define COMPLEX_OPS(X, P, D, WIDE, LOW, HIGH)                                                      \
    X(D, SUM,  x, sum_##D(a, b),     v,                      real_##D(0))                          \
    X(D, PROD, x, product_##D(a, b), v,                      real_##D(1))                          \
    X(D, AVG,  x, sum_##D(a, b),     quotient_##D(v, count), real_##D(0))                          \
    X(D, LAND, truth_##D(x), real_##D((a.re != 0) & (b.re != 0)), v, real_##D(1))                  \
    X(D, LOR,  truth_##D(x), real_##D((a.re != 0) | (b.re != 0)), v, real_##D(0))                  \
    X(D, LXOR, truth_##D(x), real_##D(a.re != b.re),              v, real_##D(0))

/* Calls X and P for every cell of the grid. */
#define EACH_CELL(KIND, X, P, D, WIDE, LOW, HIGH) KIND##_OPS(X, P, D, WIDE, LOW, HIGH)

/* ---- the loops of a cell ------------------------------------------------------------------- */

typedef struct {
    void (*begin)(void *acc, const void *row, int m);             /* the first row */
    void (*step)(void *acc, const void *row, int m);              /* acc = acc op row */
    void (*end)(const void *acc, void *out, int m, int count);    /* acc, rounded; acc is kept */
    void (*neutral)(void *out, int64_t n);
    mpicoll_user_function *user;
} cell;

#define COMMON_LOOPS(D, OP, RESULT, NEUTRAL, NEUTRAL_ODD)                                          \
    static void end_##OP##_##D(const void *from, void *to, int m, int count) {                     \
        const acc_##D *restrict acc = from;                                                        \
        stored_##D *restrict out = to;                                                             \
        (void)count;                                                                               \
        for (int i = 0; i < m; i++) {                                                              \
            const acc_##D v = acc[i];                                                              \
            out[i] = store_##D(RESULT);                                                            \
        }                                                                                          \
    }                                                                                              \
    static void neutral_##OP##_##D(void *to, int64_t n) {                                          \
        stored_##D *out = to;                                                                      \
        const stored_##D even = store_##D(NEUTRAL), odd = store_##D(NEUTRAL_ODD);                  \
        for (int64_t i = 0; i < n; i++)                                                            \
            out[i] = i & 1 ? odd : even;                                                           \
    }

#define ELEMENT_LOOPS(D, OP, PREPARED, COMBINED, RESULT, NEUTRAL)                                  \
    static void begin_##OP##_##D(void *to, const void *from, int m) {                              \
        acc_##D *restrict acc = to;                                                                \
        const stored_##D *restrict row = from;                                                     \
        for (int i = 0; i < m; i++) {                                                              \
            const acc_##D x = load_##D(row[i]);                                                    \
            acc[i] = PREPARED;                                                                     \
        }                                                                                          \
    }                                                                                              \
    static void step_##OP##_##D(void *to, const void *from, int m) {                               \
        acc_##D *restrict acc = to;                                                                \
        const stored_##D *restrict row = from;                                                     \
        for (int i = 0; i < m; i++) {                                                              \
            const acc_##D x = load_##D(row[i]), a = acc[i], b = PREPARED;                          \
            acc[i] = COMBINED;                                                                     \
        }                                                                                          \
    }                                                                                              \
    static void user_##OP##_##D(void *in, void *inout, int *len, void *datatype) {                 \
        const void *const rows[2] = {in, inout};                                                   \
        (void)datatype;                                                                            \
        mpicoll_reduce_rows(MPICOLL_##OP, MPICOLL_##D, rows, 2, inout, *len);                      \
    }                                                                                              \
    COMMON_LOOPS(D, OP, RESULT, NEUTRAL, NEUTRAL)

#define PAIR_LOOPS(D, OP, PREPARED, BETTER, NAN_TEST, VALUE, INDEX)                                \
    static void begin_##OP##_##D(void *to, const void *from, int m) {                              \
        acc_##D *restrict acc = to;                                                                \
        const stored_##D *restrict row = from;                                                     \
        for (int i = 0; i < m; i += 2) {                                                           \
            const acc_##D x = load_##D(row[i]);                                                    \
            acc[i] = PREPARED;                                                                     \
            acc[i + 1] = load_##D(row[i + 1]);                                                     \
        }                                                                                          \
    }                                                                                              \
    static void step_##OP##_##D(void *to, const void *from, int m) {                               \
        acc_##D *restrict acc = to;                                                                \
        const stored_##D *restrict row = from;                                                     \
        for (int i = 0; i < m; i += 2) {                                                           \
            const acc_##D x = load_##D(row[i]), a = acc[i], b = PREPARED;                          \
            const acc_##D a_index = acc[i + 1], b_index = load_##D(row[i + 1]);                    \
            const int tie = (a == b) | (NAN_TEST(a) & NAN_TEST(b));                                \
            const int take = (b BETTER a) | (NAN_TEST(b) & !NAN_TEST(a)) |                         \
                             (tie & (b_index < a_index));                                          \
            acc[i] = take ? b : a;                                                                 \
            acc[i + 1] = take ? b_index : a_index;                                                 \
        }                                                                                          \
    }                                                                                              \
    COMMON_LOOPS(D, OP, v, VALUE, INDEX)

#define DEFINE_LOOPS(KIND, D, STORED, ACC, WIDE, LOAD, STORE, LOW, HIGH)                           \
    EACH_CELL(KIND, ELEMENT_LOOPS, PAIR_LOOPS, D, WIDE, LOW, HIGH)
DTYPES(DEFINE_LOOPS)

#define CELL(D, OP, USER)                                                                          \
    [MPICOLL_##OP][MPICOLL_##D] = {begin_##OP##_##D, step_##OP##_##D, end_##OP##_##D,              \
                                   neutral_##OP##_##D, USER},
#define ELEMENT_CELL(D, OP, ...) CELL(D, OP, user_##OP##_##D)
#define PAIR_CELL(D, OP, ...) CELL(D, OP, NULL) /* MPI may cut a message between the two */
#define DEFINE_CELLS(KIND, D, STORED, ACC, WIDE, LOAD, STORE, LOW, HIGH)                           \
    EACH_CELL(KIND, ELEMENT_CELL, PAIR_CELL, D, WIDE, LOW, HIGH)

static const cell cells[MPICOLL_NOPS][MPICOLL_NDTYPES] = {DTYPES(DEFINE_CELLS)};

/* ---- the drivers --------------------------------------------------------------------------- */

int mpicoll_reduction_supported(int op, int dtype) {
    return op >= 0 && op < MPICOLL_NOPS && dtype >= 0 && dtype < MPICOLL_NDTYPES &&
           cells[op][dtype].begin != NULL;
}

static const cell *find_cell(int op, int dtype, int64_t n) {
    const int pairs = op == MPICOLL_MINLOC || op == MPICOLL_MAXLOC;
    if (!mpicoll_reduction_supported(op, dtype) || (pairs && n % 2 != 0))
        return NULL;
    return &cells[op][dtype];
}

int mpicoll_reduce_rows(int op, int dtype, const void *const *rows, int nrows, void *out,
                        int64_t n) {
    const cell *const c = find_cell(op, dtype, n);
    if (c == NULL || nrows < 1)
        return -1;
    const size_t size = stored_sizes[dtype];
    tile acc;
    for (int64_t start = 0; start < n; start += TILE) {
        const int m = n - start < TILE ? (int)(n - start) : TILE;
        const size_t offset = (size_t)start * size;
        c->begin(&acc, (const char *)rows[0] + offset, m);
        for (int r = 1; r < nrows; r++)
            c->step(&acc, (const char *)rows[r] + offset, m);
        c->end(&acc, (char *)out + offset, m, nrows);
    }
    return 0;
}

int mpicoll_scan_rows(int op, int dtype, const void *const *rows, int nrows, void *const *out,
                      int64_t n, int exclusive, int reverse) {
    const cell *const c = find_cell(op, dtype, n);
    if (c == NULL || nrows < 1)
        return -1;
    const size_t size = stored_sizes[dtype];
    tile acc, row;
    for (int64_t start = 0; start < n; start += TILE) {
        const int m = n - start < TILE ? (int)(n - start) : TILE;
        const size_t offset = (size_t)start * size;
        for (int k = 0; k < nrows; k++) { /* k rows are in acc */
            const int r = reverse ? nrows - 1 - k : k;
            const void *from = (const char *)rows[r] + offset;
            void *const to = (char *)out[r] + offset;
            if (exclusive) {
                /* The result goes out before the row comes in, and may overwrite it. */
                memcpy(&row, from, (size_t)m * size);
                from = &row;
                if (k == 0)
                    c->neutral(to, m);
                else
                    c->end(&acc, to, m, k);
            }
            if (k == 0)
                c->begin(&acc, from, m);
            else
                c->step(&acc, from, m);
            if (!exclusive)
                c->end(&acc, to, m, k + 1);
        }
    }
    return 0;
}

int mpicoll_fill_neutral(int op, int dtype, void *out, int64_t n) {
    const cell *const c = find_cell(op, dtype, n);
    if (c == NULL)
        return -1;
    c->neutral(out, n);
    return 0;
}

mpicoll_user_function *mpicoll_user_op(int op, int dtype) {
    if (!mpicoll_reduction_supported(op, dtype))
        return NULL;
    const int arithmetic = op == MPICOLL_SUM || op == MPICOLL_PROD || op == MPICOLL_AVG;
    return arithmetic && dtype > MPICOLL_I64 ? NULL : cells[op][dtype].user;
}
