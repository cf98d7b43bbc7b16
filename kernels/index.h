/* Index arrays, which others may change while they are read: each value is read once where it is used, and checked there. */
#ifndef KVD_KERNELS_INDEX_H
#define KVD_KERNELS_INDEX_H

#include "native.h"

/* An index array, or none: then entry i is i itself. */
typedef struct {
    const void *values;
    int width; /* bytes of one value: 4, 8, or 0 for none */
    size_t limit;
} Index;

/* Negative values come out as huge ones, so that one comparison with the limit refuses both. */
static inline size_t index_at(const Index *index, size_t i)
{
    if (index->width == 4) return (size_t)(int64_t)LOAD((const int32_t *)index->values + i);
    if (index->width == 8) return (size_t)LOAD((const int64_t *)index->values + i);
    return i;
}

/* The position of the first value that is out of range, or -1. */
static Py_ssize_t first_refused(const Index *index, size_t n)
{
    for (size_t start = 0; start < n; start += 256) {
        size_t end = n - start < 256 ? n : start + 256;
        int bad = 0;
        if (index->width == 4 && index->limit <= INT32_MAX) {
            const uint32_t *v = (const uint32_t *)index->values;
            uint32_t limit = (uint32_t)index->limit;
            for (size_t i = start; i < end; i++) bad |= v[i] >= limit;
        } else {
            for (size_t i = start; i < end; i++) bad |= index_at(index, i) >= index->limit;
        }
        if (bad)
            for (size_t i = start; i < end; i++)
                if (index_at(index, i) >= index->limit) return (Py_ssize_t)i;
    }
    return -1;
}

#endif
