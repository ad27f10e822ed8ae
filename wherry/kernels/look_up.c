/* Replaces codes of one byte, or of half of one, by words of tables, one table for each block of a matrix. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* `count` codes from code `from` on; of two codes in a byte the lower half is the first. */
#define DEFINE_ROWS(WHOLE, HALVES, WORD)                                                                             \
    static void WHOLE(const uint8_t *codes, size_t from, size_t count, const void *table, uint8_t *seen, void *out) { \
        const WORD *words = table;                                                                                   \
        WORD *to = out;                                                                                              \
        codes += from;                                                                                               \
        for (size_t i = 0; i < count; i++) {                                                                         \
            to[i] = words[codes[i]];                                                                                 \
            seen[codes[i]] = 1;                                                                                      \
        }                                                                                                            \
    }                                                                                                                \
    static void HALVES(const uint8_t *codes, size_t from, size_t count, const void *table, uint8_t *seen, void *out) { \
        const WORD *words = table;                                                                                   \
        WORD *to = out;                                                                                              \
        uint32_t found = 0;                                                                                          \
        size_t at = from, stop = from + count;                                                                       \
        if (at % 2 && at < stop) {                                                                                   \
            uint8_t code = codes[at / 2] >> 4;                                                                       \
            *to++ = words[code], found |= 1u << code, at++;                                                          \
        }                                                                                                            \
        for (; at + 2 <= stop; at += 2, to += 2) {                                                                   \
            uint8_t low = codes[at / 2] & 15, high = codes[at / 2] >> 4;                                             \
            to[0] = words[low], to[1] = words[high], found |= 1u << low | 1u << high;                                \
        }                                                                                                            \
        if (at < stop) {                                                                                             \
            uint8_t code = codes[at / 2] & 15;                                                                       \
            *to = words[code], found |= 1u << code;                                                                  \
        }                                                                                                            \
        for (int code = 0; code < 16; code++) seen[code] |= found >> code & 1;                                       \
    }
DEFINE_ROWS(row_2, halves_2, uint16_t)
DEFINE_ROWS(row_4, halves_4, uint32_t)

typedef void LookUp(const uint8_t *, size_t, size_t, const void *, uint8_t *, void *);

/* Look up a matrix of codes.
 *
 * The matrix has `rows` rows of `columns` codes of `bits` bits, 8 or 4; rows are `step` bytes apart and begin with code `skip`
 * of their bytes. Blocks have `block_rows` rows and `block_columns` columns; the first code is at (`first_row`, `first_column`)
 * of the first block. `tables` has 256 or 16 words of `size` bytes for each block, in rows of `wide` blocks, and `seen` a byte
 * for each of these words, which becomes 1 where its code occurs. Rows of `out` are `out_step` bytes apart. Returns 0, or -1
 * for other bits, and for a size other than 2 and 4. */
EXPORT int wherry_look_up(const uint8_t *codes, size_t step, size_t skip, int bits, size_t rows, size_t columns,
                          const uint8_t *tables, int size, size_t wide, size_t first_row, size_t first_column,
                          size_t block_rows, size_t block_columns, uint8_t *out, size_t out_step, uint8_t *seen) {
    if ((size != 2 && size != 4) || (bits != 8 && bits != 4)) return -1;
    LookUp *look_up = bits == 8 ? (size == 2 ? row_2 : row_4) : (size == 2 ? halves_2 : halves_4);
    size_t word = (size_t)size, count_of_codes = (size_t)1 << bits;
    for (size_t row = 0; row < rows; row++) {
        size_t down = (first_row + row) / block_rows;
        for (size_t column = 0; column < columns;) {
            size_t across = (first_column + column) / block_columns;
            size_t left = (across + 1) * block_columns - first_column - column;
            size_t count = columns - column < left ? columns - column : left;
            size_t table = (down * wide + across) * count_of_codes;
            look_up(codes + row * step, skip + column, count, tables + table * word, seen + table,
                    out + row * out_step + column * word);
            column += count;
        }
    }
    return 0;
}
