/* The benchmarks' reference read. */
#include "tm_layout.h"
#include "tm_reduce.h"
#include "tm_table.h"

uint64_t tm_plain_read(const void *data, size_t bytes) {
    const tm_table *table = tm_table_get();
    return table != NULL ? table->read->read(data, bytes) : 0;
}

uint64_t tm_plain_read_views(const tm_view *views, size_t count) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    tm_layout layout;
    uint64_t total = 0;

    for (size_t i = 0; i < count; i++) {
        int64_t step;
        tm_layout_init(&layout, &views[i]);
        for (int64_t done = 0; done < layout.n; done += step) {
            const void *block = tm_layout_block(&layout, done, layout.n - done, scratch, &step);
            total += tm_plain_read(block, (size_t)step * layout.item);
        }
    }
    return total;
}
