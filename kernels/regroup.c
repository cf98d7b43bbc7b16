/* Regrouping: many small boxes of one shape, each from one strided place to another, as one kernel. Tiling, untiling, block
 * tables and plain runs are all of this form; kernels/reference.py defines the result, native.c states the contract.
 *
 * A box is walked in the order of the target, so that its stores fill whole cache lines one after another. What is read for
 * the next box is prefetched meanwhile: its rows lie too far apart for the hardware to see the pattern.
 */
#include "native.h"

#define MAX_DIMS 8

typedef struct {
    size_t shape[MAX_DIMS], source[MAX_DIMS], target[MAX_DIMS]; /* outermost first; strides in bytes */
    int dims;                                                   /* two at least */
    size_t item;                                                /* contiguous bytes in both */
} Box;

typedef struct {
    char *target;
    const char *source;
    const int64_t *places;
    size_t n;
    uint64_t source_last, target_last; /* the last places at which a box still fits */
    Box box;
} Regroup;

/* ---------------------------------------------------------------- one box */

/* COPY(target, source, bytes) for every item; `ahead` is the next box's source, or this one's. */
#define BOX_BODY(ITEM, COPY, PREFETCH)                                                              \
    size_t at[MAX_DIMS] = {0};                                                                      \
    const int rows = b->dims - 2, columns = b->dims - 1;                                            \
    const size_t m = b->shape[rows], n = b->shape[columns];                                         \
    const size_t down_source = b->source[rows], down_target = b->target[rows];                      \
    const size_t right_source = b->source[columns], right_target = b->target[columns];              \
    size_t from = 0, to = 0;                                                                        \
    for (;;) {                                                                                      \
        for (size_t i = 0; i < m; i++) {                                                            \
            const size_t f = from + i * down_source, g = to + i * down_target;                      \
            for (size_t j = 0; j < n; j++) {                                                        \
                if (PREFETCH) __builtin_prefetch((const void *)(ahead + f + j * right_source), 0, 3); \
                COPY(target + g + j * right_target, source + f + j * right_source, (ITEM));         \
            }                                                                                       \
        }                                                                                           \
        int d = rows - 1;                                                                           \
        for (; d >= 0; d--) {                                                                       \
            from += b->source[d];                                                                   \
            to += b->target[d];                                                                     \
            if (++at[d] < b->shape[d]) break;                                                       \
            from -= b->source[d] * b->shape[d];                                                     \
            to -= b->target[d] * b->shape[d];                                                       \
            at[d] = 0;                                                                              \
        }                                                                                           \
        if (d < 0) return;                                                                          \
    }

typedef void (*CopyBox)(char *target, const char *source, uintptr_t ahead, const Box *b);

#define COPY_BOX(NAME, ITEM, PREFETCH)                                                  \
    static void NAME(char *target, const char *source, uintptr_t ahead, const Box *b)   \
    {                                                                                   \
        (void)ahead;                                                                    \
        BOX_BODY(ITEM, memcpy, PREFETCH)                                                \
    }

COPY_BOX(copy_1, 1, 0)
COPY_BOX(copy_2, 2, 0)
COPY_BOX(copy_4, 4, 0)
COPY_BOX(copy_8, 8, 0)
COPY_BOX(copy_16, 16, 1)
COPY_BOX(copy_32, 32, 1)
COPY_BOX(copy_64, 64, 1)
COPY_BOX(copy_any, b->item, 1)

static CopyBox copy_for(size_t item)
{
    switch (item) {
    case 1: return copy_1;
    case 2: return copy_2;
    case 4: return copy_4;
    case 8: return copy_8;
    case 16: return copy_16;
    case 32: return copy_32;
    case 64: return copy_64;
    default: return copy_any;
    }
}

#if HAVE_AVX2
static inline void stream_16(char *target, const char *source, size_t bytes)
{
    (void)bytes;
    _mm_stream_si128((__m128i *)target, _mm_loadu_si128((const __m128i *)source));
}

#define STREAM_BOX(NAME, ITEM, COPY)                                                        \
    AVX2 static void NAME(char *target, const char *source, uintptr_t ahead, const Box *b)  \
    {                                                                                       \
        BOX_BODY(ITEM, COPY, 1)                                                             \
    }

STREAM_BOX(stream_box_16, 16, stream_16)
STREAM_BOX(stream_box_32, 32, stream_row)
STREAM_BOX(stream_box_64, 64, stream_row)
STREAM_BOX(stream_box_any, b->item, stream_row)

/* The streaming copy where a box's stores fill whole lines in order, once it begins at one; else NULL. */
static CopyBox stream_for(const Box *b)
{
    size_t filled = b->item;
    int d = b->dims - 1;
    for (; d >= 0 && (b->target[d] == filled || b->shape[d] == 1); d--) filled *= b->shape[d];
    for (; d >= 0; d--)
        if (b->target[d] % 64 && b->shape[d] > 1) return NULL;
    if (filled % 64) return NULL;
    if (b->item == 16) return stream_box_16;
    if (b->item == 32) return stream_box_32;
    if (b->item == 64) return stream_box_64;
    return b->item % 32 ? NULL : stream_box_any;
}
#endif

#if HAVE_AVX2
#define ABREAST 8

/* What a box's rows must be for boxes that lie side by side in the target to be copied row by row: one dim of items that
 * fill whole lines, and the rows apart. A row of all of them is one long run then, where each alone would write a line here
 * and a line there (untiling). */
static int rows_apart(const Box *b)
{
    const int columns = b->dims - 1;
    const size_t filled = b->item * b->shape[columns];
    return (b->shape[columns] == 1 || b->target[columns] == b->item) && filled % 64 == 0 && b->item % 32 == 0 &&
           filled <= 1024 && b->target[columns - 1] > filled && b->shape[columns - 1] > 1;
}

AVX2 static void stream_abreast(char *target, const char *const *sources, const uintptr_t *ahead, size_t boxes, const Box *b)
{
    const int columns = b->dims - 1;
    const size_t n = b->shape[columns], item = b->item, right = b->source[columns], filled = n * item;
    size_t at[MAX_DIMS] = {0}, from = 0, to = 0;
    for (;;) {
        for (size_t g = 0; g < boxes; g++)
            for (size_t j = 0; j < n; j++) {
                __builtin_prefetch((const void *)(ahead[g] + from + j * right), 0, 3);
                stream_row(target + to + g * filled + j * item, sources[g] + from + j * right, item);
            }
        int d = columns - 1;
        for (; d >= 0; d--) {
            from += b->source[d];
            to += b->target[d];
            if (++at[d] < b->shape[d]) break;
            from -= b->source[d] * b->shape[d];
            to -= b->target[d] * b->shape[d];
            at[d] = 0;
        }
        if (d < 0) return;
    }
}

/* As regroup_all, several boxes at once where they lie side by side. */
static Py_ssize_t regroup_abreast(const Regroup *r, CopyBox copy, CopyBox stream)
{
    const size_t filled = r->box.item * r->box.shape[r->box.dims - 1];
    for (size_t i = 0; i < r->n;) {
        const char *sources[ABREAST];
        uintptr_t ahead[ABREAST];
        uint64_t first = 0;
        size_t g = 0;
        for (; g < ABREAST && i + g < r->n; g++) {
            uint64_t from = (uint64_t)LOAD(r->places + 2 * (i + g)), to = (uint64_t)LOAD(r->places + 2 * (i + g) + 1);
            if (from > r->source_last || to > r->target_last) {
                if (g > 0) break; /* those before it first */
                return (Py_ssize_t)i;
            }
            if (g == 0) first = to;
            else if (to != first + g * filled) break;
            sources[g] = r->source + from;
        }
        for (size_t k = 0; k < g; k++) /* a hint only: not checked */
            ahead[k] = (uintptr_t)r->source +
                       (uintptr_t)LOAD(r->places + 2 * (i + g + k < r->n ? i + g + k : r->n - 1));
        char *target = r->target + first;
        if ((uintptr_t)target % 64 == 0 && g > 1) stream_abreast(target, sources, ahead, g, &r->box);
        else
            for (size_t k = 0; k < g; k++)
                ((uintptr_t)target % 64 == 0 ? stream : copy)(target + k * filled, sources[k], ahead[k], &r->box);
        i += g;
    }
    return -1;
}
#endif

/* ---------------------------------------------------------------- all boxes */

/* Each place is read once where it is used, since somebody else may write to it (native.c). */
static Py_ssize_t regroup_all(const Regroup *r, CopyBox copy, CopyBox stream)
{
    for (size_t i = 0; i < r->n; i++) {
        uint64_t from = (uint64_t)LOAD(r->places + 2 * i), to = (uint64_t)LOAD(r->places + 2 * i + 1);
        if (from > r->source_last || to > r->target_last) return (Py_ssize_t)i;
        uint64_t next = i + 1 < r->n ? (uint64_t)LOAD(r->places + 2 * i + 2) : from; /* a hint only: not checked */
        uintptr_t ahead = (uintptr_t)r->source + (uintptr_t)next;
        char *target = r->target + to;
        (stream != NULL && (uintptr_t)target % 64 == 0 ? stream : copy)(target, r->source + from, ahead, &r->box);
    }
    return -1;
}

static Py_ssize_t places_refused(const Regroup *r)
{
    for (size_t i = 0; i < r->n; i++)
        if ((uint64_t)LOAD(r->places + 2 * i) > r->source_last || (uint64_t)LOAD(r->places + 2 * i + 1) > r->target_last)
            return (Py_ssize_t)i;
    return -1;
}

/* Fills the box from (shape, source stride, target stride) triples; 0 where something is negative, too much, or does not fit
 * the buffers at any place. `bytes` is what a box moves; 0 where it moves nothing. */
static int read_box(Regroup *r, const int64_t *dims, int n, Py_ssize_t item, uint64_t source_bytes, uint64_t target_bytes,
                    uint64_t *bytes)
{
    Box *b = &r->box;
    uint64_t reach[2] = {(uint64_t)item, (uint64_t)item};
    int pad = n < 2 ? 2 - n : 0, empty = 0;
    if (item <= 0) return 0;
    *bytes = (uint64_t)item;
    b->dims = n + pad;
    b->item = (size_t)item;
    for (int d = 0; d < b->dims; d++) {
        int64_t size = d < pad ? 1 : dims[3 * (d - pad)];
        int64_t stride[2] = {d < pad ? 0 : dims[3 * (d - pad) + 1], d < pad ? 0 : dims[3 * (d - pad) + 2]};
        if (size < 0 || stride[0] < 0 || stride[1] < 0) return 0;
        b->shape[d] = (size_t)size;
        b->source[d] = (size_t)stride[0];
        b->target[d] = (size_t)stride[1];
        empty |= size == 0;
        if (__builtin_mul_overflow(*bytes, (uint64_t)size, bytes)) return 0;
        for (int side = 0; side < 2; side++) {
            uint64_t step;
            if (__builtin_mul_overflow((uint64_t)stride[side], size > 0 ? (uint64_t)size - 1 : 0, &step)) return 0;
            if (__builtin_add_overflow(reach[side], step, &reach[side])) return 0;
        }
    }
    if (empty || r->n == 0) {
        *bytes = 0;
        return 1;
    }
    if (reach[0] > source_bytes || reach[1] > target_bytes) return 0;
    r->source_last = source_bytes - reach[0];
    r->target_last = target_bytes - reach[1];
    return 1;
}

const char kvd_regroup_doc[] =
    "regroup(avx2, source, target, places, dims, item_bytes, stream_from) -> int\n\n"
    "places: pairs of int64, source and target offset of each box; dims: triples of int64, shape, source and target stride;\n"
    "stream_from: results of so many bytes and more bypass the caches, 0: as everywhere else.";

PyObject *kvd_regroup(PyObject *self, PyObject *args)
{
    int avx2;
    Py_ssize_t item, stream_from, bad = -1;
    Py_buffer source, target, places, dims;
    if (!PyArg_ParseTuple(args, "py*w*y*y*nn", &avx2, &source, &target, &places, &dims, &item, &stream_from)) return NULL;
    int sound = places.len % 16 == 0 && dims.len % 24 == 0 && dims.len / 24 <= MAX_DIMS;
    if (sound) {
        Regroup r = {.target = target.buf, .source = source.buf, .places = places.buf, .n = (size_t)places.len / 16};
        int64_t own[3 * MAX_DIMS]; /* read once */
        uint64_t bytes = 0, total;
        memcpy(own, dims.buf, (size_t)dims.len);
        sound = read_box(&r, own, (int)(dims.len / 24), item, (uint64_t)source.len, (uint64_t)target.len, &bytes);
        if (sound && bytes > 0) {
            if (__builtin_mul_overflow(bytes, (uint64_t)r.n, &total)) total = UINT64_MAX; /* boxes may share source bytes */
            CopyBox stream = NULL;
#if HAVE_AVX2
            if (avx2 && total >= (stream_from > 0 ? (uint64_t)stream_from : STREAM_BYTES)) stream = stream_for(&r.box);
#endif
            BEGIN_WORK(total >= RELEASE_BYTES || r.n >= RELEASE_ENTRIES / 4);
            bad = places_refused(&r);
#if HAVE_AVX2
            if (bad < 0 && stream != NULL && rows_apart(&r.box)) bad = regroup_abreast(&r, copy_for(r.box.item), stream);
            else
#endif
            if (bad < 0) bad = regroup_all(&r, copy_for(r.box.item), stream);
#if HAVE_AVX2
            if (stream != NULL) _mm_sfence(); /* whoever is told that the bytes are there must see them */
#endif
            END_WORK();
        }
    }
    (void)avx2;
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    PyBuffer_Release(&places);
    PyBuffer_Release(&dims);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "regroup: the box and the buffers' sizes do not fit each other; call kvd_kernels.regroup");
        return NULL;
    }
    return PyLong_FromSsize_t(bad);
}

/* ---------------------------------------------------------------- zeroing */

const char kvd_zero_doc[] = "zero(avx2, target, offsets, nbytes) -> int";

PyObject *kvd_zero(PyObject *self, PyObject *args)
{
    int avx2;
    Py_ssize_t nbytes, bad = -1;
    Py_buffer target, offsets;
    if (!PyArg_ParseTuple(args, "pw*y*n", &avx2, &target, &offsets, &nbytes)) return NULL;
    (void)avx2; /* the C library streams by itself where it pays */
    size_t n = (size_t)offsets.len / 8;
    int sound = offsets.len % 8 == 0 && nbytes >= 0 && (n == 0 || nbytes <= target.len);
    if (sound && nbytes > 0) {
        const int64_t *at = offsets.buf;
        uint64_t last = (uint64_t)(target.len - nbytes);
        BEGIN_WORK(n >= RELEASE_ENTRIES / 4 || n * (size_t)nbytes >= RELEASE_BYTES);
        for (size_t i = 0; i < n && bad < 0; i++)
            if ((uint64_t)LOAD(at + i) > last) bad = (Py_ssize_t)i;
        for (size_t i = 0; i < n && bad < 0; i++) {
            uint64_t offset = (uint64_t)LOAD(at + i);
            if (offset > last) bad = (Py_ssize_t)i;
            else memset((char *)target.buf + offset, 0, (size_t)nbytes);
        }
        END_WORK();
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&offsets);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "zero: offsets are not int64, or nbytes exceeds the target; call kvd_kernels.zero");
        return NULL;
    }
    return PyLong_FromSsize_t(bad);
}
