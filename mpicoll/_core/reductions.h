/* Element-wise reductions of several buffers, for every torch dtype.
 *
 * Plain C11: no Python, no MPI. Nothing here allocates or keeps state, so every function may be
 * called from any thread and with the GIL released. Buffers are aligned for their element type.
 */
#ifndef MPICOLL_REDUCTIONS_H
#define MPICOLL_REDUCTIONS_H

#include <stdint.h>

/* The codes equal the values of mpicoll.ReduceOp. */
enum {
    MPICOLL_MAX = 0,
    MPICOLL_MIN = 1,
    MPICOLL_SUM = 2,
    MPICOLL_PROD = 3,
    MPICOLL_LAND = 4,
    MPICOLL_BAND = 5,
    MPICOLL_LOR = 6,
    MPICOLL_BOR = 7,
    MPICOLL_LXOR = 8,
    MPICOLL_BXOR = 9,
    MPICOLL_MINLOC = 10,
    MPICOLL_MAXLOC = 11,
    MPICOLL_AVG = 12,
    MPICOLL_NOPS = 13
};

enum {
    MPICOLL_BOOL = 0,
    MPICOLL_U8,
    MPICOLL_I8,
    MPICOLL_U16,
    MPICOLL_I16,
    MPICOLL_U32,
    MPICOLL_I32,
    MPICOLL_U64,
    MPICOLL_I64,
    MPICOLL_F16,
    MPICOLL_BF16,
    MPICOLL_F32,
    MPICOLL_F64,
    MPICOLL_C64,
    MPICOLL_C128,
    MPICOLL_NDTYPES
};

/* 1 where the operation is defined for the dtype, 0 where not (or a code is unknown).
 *
 *   MAX MIN          all but complex; a NaN gives the canonical quiet NaN; +0.0 > -0.0
 *   SUM PROD         all; integers wrap around; bool: or, and
 *   AVG              floating point and complex
 *   LAND LOR LXOR    all; the result is 0 or 1 in the dtype; a NaN is true
 *   BAND BOR BXOR    integers and bool
 *   MINLOC MAXLOC    integers and floating point: (value, index) pairs of the dtype; n counts
 *                    elements, so it is even; ties go to the lowest index; a NaN wins
 *
 * float16 and bfloat16 are computed in float32 and rounded once, to nearest even. */
int mpicoll_reduction_supported(int op, int dtype);

/* out[i] = rows[0][i] op rows[1][i] op ..., in the order of the rows; AVG divides by nrows.
 * out may be one of the rows. Returns 0, or -1 when that is not supported (also: nrows < 1, or an
 * odd n for pairs), with nothing written. */
int mpicoll_reduce_rows(int op, int dtype, const void *const *rows, int nrows, void *out,
                        int64_t n);

/* out[r] combines the rows s <= r, in ascending order; exclusive: s < r, and out[0] is the neutral
 * element. With reverse: s >= r (s > r), in descending order. AVG divides by the number of rows
 * combined. out[r] may be rows[r]. Returns as mpicoll_reduce_rows. */
int mpicoll_scan_rows(int op, int dtype, const void *const *rows, int nrows, void *const *out,
                      int64_t n, int exclusive, int reverse);

/* Fills out with the neutral element. Returns as mpicoll_reduce_rows. */
int mpicoll_fill_neutral(int op, int dtype, void *out, int64_t n);

/* Shaped like MPI_User_function: inout = in op inout; *len counts elements of the dtype. */
typedef void mpicoll_user_function(void *in, void *inout, int *len, void *datatype);

/* The function for an operation that is associative and commutative bit for bit: MAX and MIN, the
 * logical and bitwise ones, everything of bool, sums and products of integers (which wrap); NULL for
 * all others. MPI does not call it for a
 * single operand (one rank; rank 0 of a scan), which then stays as it is: a logical operation
 * does not make a 5 a 1 there, nor MAX a NaN the canonical one. */
mpicoll_user_function *mpicoll_user_op(int op, int dtype);

#endif
