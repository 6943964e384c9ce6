/* SPDX-License-Identifier: MIT */
/* A binary heap of 64-bit keys, smallest on top, over the caller's memory, which is large enough: of both
 * tokenizers' pairs that may be joined. */
#ifndef INF_HEAP_H
#define INF_HEAP_H

#include <stddef.h>
#include <stdint.h>

struct inf_heap {
    uint64_t *keys; /* rank << 32 | index, smallest on top */
    size_t n;
};

static inline void inf_heap_sift_down(struct inf_heap *heap, size_t at)
{
    uint64_t key = heap->keys[at];
    for (size_t child; (child = 2 * at + 1) < heap->n; at = child) {
        child += child + 1 < heap->n && heap->keys[child + 1] < heap->keys[child];
        if (heap->keys[child] >= key)
            break;
        heap->keys[at] = heap->keys[child];
    }
    heap->keys[at] = key;
}

static inline void inf_heap_push(struct inf_heap *heap, uint64_t key)
{
    size_t at = heap->n++;
    for (; at && heap->keys[(at - 1) / 2] > key; at = (at - 1) / 2)
        heap->keys[at] = heap->keys[(at - 1) / 2];
    heap->keys[at] = key;
}

static inline uint64_t inf_heap_pop(struct inf_heap *heap)
{
    uint64_t top = heap->keys[0];
    heap->keys[0] = heap->keys[--heap->n];
    if (heap->n)
        inf_heap_sift_down(heap, 0);
    return top;
}

#endif
