/* Template: folding modulo one polynomial. Parameters: TM_BITS, its degree, and TM_TAP_1 < TM_TAP_2 <
 * TM_TAP_3, the exponents between 0 and the degree. Technique: tm_fingerprint_kernels.h. */

#define TM_SPAN TM_BITS /* rows: y^TM_BITS is the highest power in the identity */
#define TM_NAMED(name) TM_PASTE(TM_PASTE(fingerprint_, name), TM_PASTE(_, TM_BITS))

/* One strip of rows into consecutive slots. What is handed on through memory arrives some ten cycles later:
 * rows up to four back stay in registers, the oldest giving its place to the new one, and none waits for more
 * than one XOR with the row before it. TM_REGISTERS: whole rows go to `copy`, past the caches, as they come
 * by. */
#define TM_STEP(r, back_1, back_2, back_3, back_4)                                                           \
    row = p[(r) * TM_STRIPS];                                                                                \
    others = TM_LITTLE_STRIP(row) ^ slot[(r) * TM_STRIPS] ^                                                  \
             TM_PASTE(TM_BACK_, TM_TAP_2)(r, back_2, back_3) ^ TM_PASTE(TM_BACK_, TM_TAP_3)(r, back_4);      \
    slot[(r) * TM_STRIPS] = back_4 = others ^ back_1;                                                        \
    if (copying == TM_REGISTERS && TM_STRIPS == 1) {                                                         \
        stream_row(copy + (r) * TM_PRINT_ROW, row);                                                          \
    }
TM_INLINE void TM_NAMED(strip)(tm_strip *restrict slot, const tm_strip *restrict p, size_t rows, int first,
                               int copying, char *copy, const char *ahead) {
    tm_strip a = slot[-1 * TM_STRIPS], b = slot[-2 * TM_STRIPS], c = slot[-3 * TM_STRIPS];
    tm_strip d = slot[-4 * TM_STRIPS], row, others;
    for (; rows >= 4; rows -= 4, p += 4 * TM_STRIPS, slot += 4 * TM_STRIPS) {
        if (first && copying) {
            tm_prefetch_second(ahead, 4 * TM_PRINT_ROW), ahead += 4 * TM_PRINT_ROW;
        } else if (first) {
            tm_prefetch_row(p, 4 * TM_PRINT_ROW);
        }
        TM_STEP(0, a, b, c, d)
        TM_STEP(1, d, a, b, c)
        TM_STEP(2, c, d, a, b)
        TM_STEP(3, b, c, d, a)
        copy += copying ? 4 * TM_PRINT_ROW : 0;
    }
    for (; rows > 0; rows--, p += TM_STRIPS, slot += TM_STRIPS) {
        *slot ^= TM_LITTLE_STRIP(*p) ^ slot[-TM_TAP_1 * TM_STRIPS] ^ slot[-TM_TAP_2 * TM_STRIPS] ^
                 slot[-TM_TAP_3 * TM_STRIPS];
        if (copying == TM_REGISTERS && TM_STRIPS == 1) {
            stream_row(copy, *p), copy += TM_PRINT_ROW;
        }
    }
}
#undef TM_STEP

/* A few rows at a time, so that reading memory, folding the other strips from the cache and writing past it
 * alternate quickly. */
TM_INLINE void TM_NAMED(run)(void *slot, const void *data, size_t rows, int copying, char *copy,
                             const char *ahead) {
    tm_strip *to = slot;
    const tm_strip *p = data;
    for (size_t part; rows > 0; rows -= part, p += part * TM_STRIPS, to += part * TM_STRIPS) {
        part = rows < TM_STRIP_ROWS ? rows : TM_STRIP_ROWS;
        if (copying) {
            tm_stream_ahead(copy, part);
        }
        TM_NAMED(strip)(to, p, part, 1, copying, copy, ahead);
        for (int strip = 1; strip < TM_STRIPS; strip++) {
            TM_NAMED(strip)(to + strip, p + strip, part, 0, TM_NOT, NULL, NULL);
        }
        if (copying == TM_LINES || (copying == TM_REGISTERS && TM_STRIPS > 1)) {
            tm_stream_lines(copy, p, part);
        }
        if (copying) {
            copy += part * TM_PRINT_ROW, ahead += part * TM_PRINT_ROW;
        }
    }
}

/* The slot of the next row; *turn: how many of the rows fit behind it. */
static void *TM_NAMED(slot)(tm_print_window *window, size_t rows, size_t *turn) {
    if (window->next == TM_SPAN) {
        memcpy(window->row, window->row + TM_SPAN, sizeof window->row[0] * TM_PRINT_GUARD);
        window->next = 0;
    }
    void *slot = window->row[TM_PRINT_GUARD + window->next];
    *turn = TM_SPAN - window->next < rows ? TM_SPAN - window->next : rows;
    window->next += *turn;
    window->rows += (int64_t)*turn;
    return slot;
}

TM_NOINLINE void TM_NAMED(rows)(tm_print_window *window, const void *data, size_t rows) {
    const char *p = data;
    for (size_t turn; rows > 0; rows -= turn, p += turn * TM_PRINT_ROW) {
        void *slot = TM_NAMED(slot)(window, rows, &turn);
        TM_NAMED(run)(slot, p, turn, TM_NOT, NULL, NULL);
    }
}

TM_NOINLINE void TM_NAMED(rows_copying)(tm_print_window *window, const void *data, size_t rows, void *copy,
                                        const void *ahead) {
    const char *p = data, *later = ahead != NULL ? ahead : data;
    char *out = copy;
    int lines = tm_stream_hinders(copy, data);
    for (size_t turn, done; rows > 0; rows -= turn, p += done, out += done, later += done) {
        void *slot = TM_NAMED(slot)(window, rows, &turn);
        done = turn * TM_PRINT_ROW;
        if (lines) {
            TM_NAMED(run)(slot, p, turn, TM_LINES, out, later);
        } else {
            TM_NAMED(run)(slot, p, turn, TM_REGISTERS, out, later);
        }
    }
}

/* n > TM_SPAN elements of a power-of-two size become the first TM_SPAN: z^(size * TM_SPAN) is the sum of
 * four powers too, hence each element is added to four others TM_SPAN or a little less below it. From the top
 * down, TM_HALF_SPAN at a time: no target of a step is a source of it. Elements behind the n-th are 0, for
 * 2 * TM_SPAN more. */
#define TM_HALF_SPAN (TM_SPAN / 2)
#define TM_DEFINE_FOLD(name, type)                                                                           \
    TM_NOINLINE void TM_NAMED(name)(type * x, size_t n) {                                                    \
        size_t p = (n - TM_SPAN + TM_TAP_3 + TM_HALF_SPAN - 1) / TM_HALF_SPAN * TM_HALF_SPAN;                \
        while ((p -= TM_HALF_SPAN) > 0) {                                                                    \
            type *to = x + p, *from = x + p + TM_SPAN;                                                       \
            for (int l = 0; l < TM_HALF_SPAN; l++) {                                                         \
                type sum = (type)(from[l] ^ from[l - TM_TAP_1] ^ from[l - TM_TAP_2] ^ from[l - TM_TAP_3]);   \
                to[l] = (type)(to[l] ^ sum);                                                                 \
            }                                                                                                \
        }                                                                                                    \
        for (int l = 0; l < TM_HALF_SPAN; l++) { /* what lies below TM_SPAN stays */                         \
            type sum = x[l + TM_SPAN];                                                                       \
            sum = (type)(sum ^ (l >= TM_TAP_1 ? x[l + TM_SPAN - TM_TAP_1] : 0));                             \
            sum = (type)(sum ^ (l >= TM_TAP_2 ? x[l + TM_SPAN - TM_TAP_2] : 0));                             \
            sum = (type)(sum ^ (l >= TM_TAP_3 ? x[l + TM_SPAN - TM_TAP_3] : 0));                             \
            x[l] = (type)(x[l] ^ sum);                                                                       \
        }                                                                                                    \
    }
TM_DEFINE_FOLD(fold_64, uint64_t)
TM_DEFINE_FOLD(fold_32, uint32_t)
TM_DEFINE_FOLD(fold_16, uint16_t)
TM_DEFINE_FOLD(fold_8, uint8_t)
#undef TM_DEFINE_FOLD

/* acc * z^TM_BITS + block, where z^TM_BITS is a sum of four small powers. */
TM_INLINE tm_gf TM_NAMED(step)(tm_gf acc, tm_gf block) {
#if TM_BITS == 128
    uint64_t over = acc.high >> (64 - TM_TAP_1) ^ acc.high >> (64 - TM_TAP_2) ^ acc.high >> (64 - TM_TAP_3);
    block.high ^= acc.high ^ acc.high << TM_TAP_1 ^ acc.high << TM_TAP_2 ^ acc.high << TM_TAP_3 ^
                  acc.low >> (64 - TM_TAP_1) ^ acc.low >> (64 - TM_TAP_2) ^ acc.low >> (64 - TM_TAP_3);
#else
    uint64_t over = acc.low >> (64 - TM_TAP_1) ^ acc.low >> (64 - TM_TAP_2) ^ acc.low >> (64 - TM_TAP_3);
#endif
    block.low ^= acc.low ^ acc.low << TM_TAP_1 ^ acc.low << TM_TAP_2 ^ acc.low << TM_TAP_3;
    block.low ^= over ^ over << TM_TAP_1 ^ over << TM_TAP_2 ^ over << TM_TAP_3;
    return block;
}

/* Room for a full window, a tail, and what folding reads behind them. */
#define TM_ROOM ((TM_SPAN + 1) * TM_PRINT_WORDS + 2 * TM_SPAN)

/* More than TM_SPAN elements of `size` bytes become TM_SPAN of them; what folding them as smaller ones reads
 * behind is cleared. */
#define TM_FOLD_TO(size, name, member)                                                                       \
    if (length > (size) * TM_SPAN) {                                                                         \
        TM_NAMED(name)(x.member, length / (size));                                                           \
        length = (size) * TM_SPAN;                                                                           \
        memset(x.byte + length, 0, length);                                                                  \
    }

/* The residue of n words (zero behind them): ever smaller elements, then the digest step by step. Straight
 * from 8 bytes to 1 each step would wait for what the one before it stored. */
TM_NOINLINE tm_gf TM_NAMED(residue)(uint64_t *words, size_t n) {
    _Alignas(64) union {
        uint64_t word[3 * TM_SPAN];
        uint32_t half[6 * TM_SPAN];
        uint16_t quarter[12 * TM_SPAN];
        uint8_t byte[24 * TM_SPAN];
    } x;
    tm_gf acc = {0, 0};
    if (n > TM_SPAN) {
        TM_NAMED(fold_64)(words, n);
        n = TM_SPAN;
    }
    for (size_t i = 0; i < n; i++) {
        x.word[i] = TM_LITTLE(words[i]);
    }
    memset(x.word + n, 0, sizeof x - 8 * n);
    size_t length = 8 * n;
    TM_FOLD_TO(4, fold_32, half)
    TM_FOLD_TO(2, fold_16, quarter)
    TM_FOLD_TO(1, fold_8, byte)
    for (size_t i = (length + TM_BITS / 8 - 1) / (TM_BITS / 8); i-- > 0;) {
        uint64_t pair[2] = {0, 0};
        memcpy(pair, x.byte + i * (TM_BITS / 8), TM_BITS / 8);
        acc = TM_NAMED(step)(acc, (tm_gf){TM_LITTLE(pair[0]), TM_LITTLE(pair[1])});
    }
    return acc;
}
#undef TM_FOLD_TO

/* Little-endian bytes as words; the last one is filled up with zeros, and what folding reads follows. */
TM_INLINE size_t TM_NAMED(words)(uint64_t *words, const void *data, size_t bytes) {
    size_t n = (bytes + 7) / 8;
    memcpy(words, data, bytes);
    memset((char *)words + bytes, 0, 8 * (n + 2 * TM_SPAN) - bytes);
    for (size_t i = 0; i < n; i++) {
        words[i] = TM_LITTLE(words[i]);
    }
    return n;
}

static tm_gf TM_NAMED(small)(const void *data, size_t bytes) {
    _Alignas(64) uint64_t words[TM_ROOM];
    size_t n = TM_NAMED(words)(words, bytes > 0 ? data : words, bytes);
    return TM_NAMED(residue)(words, n);
}

/* A row of the window holds what it would hand on to later rows; only rows that left the window have done so.
 * Adding the rows TM_TAP_1, 2, 3 before it, those still in the window, takes the others' part out again. */
static tm_gf TM_NAMED(close)(const tm_print_window *window, const void *tail, size_t bytes) {
    _Alignas(64) uint64_t room[TM_PRINT_GUARD * TM_PRINT_WORDS + TM_ROOM],
        *words = room + TM_PRINT_GUARD * TM_PRINT_WORDS;
    size_t rows = window->rows < TM_SPAN ? (size_t)window->rows : TM_SPAN;
    size_t oldest = window->rows < TM_SPAN ? 0 : window->next % TM_SPAN;

    memset(room, 0, sizeof window->row[0] * TM_PRINT_GUARD); /* before the oldest row */
    memcpy(words, window->row[TM_PRINT_GUARD + oldest], (rows - oldest) * TM_PRINT_ROW);
    memcpy(words + (rows - oldest) * TM_PRINT_WORDS, window->row[TM_PRINT_GUARD], oldest * TM_PRINT_ROW);
    for (tm_strip *strip = (tm_strip *)words + rows * TM_STRIPS; strip-- > (tm_strip *)words;) {
        *strip ^= strip[-TM_TAP_1 * TM_STRIPS] ^ strip[-TM_TAP_2 * TM_STRIPS] ^ strip[-TM_TAP_3 * TM_STRIPS];
    }
    words += rows * TM_PRINT_WORDS;
    size_t n = TM_NAMED(words)(words, tail, bytes);
    return TM_NAMED(residue)(words - rows * TM_PRINT_WORDS, rows * TM_PRINT_WORDS + n);
}

#undef TM_SPAN
#undef TM_NAMED
#undef TM_HALF_SPAN
#undef TM_ROOM
#undef TM_BITS
#undef TM_TAP_1
#undef TM_TAP_2
#undef TM_TAP_3
