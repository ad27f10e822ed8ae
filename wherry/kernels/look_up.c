/* Replaces codes of one byte by words of tables, one table for each block of a matrix. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { CODES = 256 };

#define DEFINE_ROW(NAME, WORD)                                                                            \
    static void NAME(const uint8_t *codes, size_t count, const void *table, uint8_t *seen, void *out) {   \
        const WORD *words = table;                                                                        \
        WORD *to = out;                                                                                   \
        for (size_t i = 0; i < count; i++) {                                                              \
            to[i] = words[codes[i]];                                                                      \
            seen[codes[i]] = 1;                                                                           \
        }                                                                                                 \
    }
DEFINE_ROW(row_2, uint16_t)
DEFINE_ROW(row_4, uint32_t)

/* Look up a matrix of codes.
 *
 * The matrix has `rows` rows of `columns` codes without gaps. Blocks have `block_rows` rows and `block_columns` columns; the
 * first code is at (`first_row`, `first_column`) of the first block. `tables` has 256 words of `size` bytes for each block, in
 * rows of `wide` blocks, and `seen` a byte for each of these words, which becomes 1 where its code occurs. Returns 0, or -1
 * for a size other than 2 and 4. Rows of `out` are `out_step` bytes apart. */
EXPORT int wherry_look_up(const uint8_t *codes, size_t rows, size_t columns, const uint8_t *tables, int size, size_t wide,
                          size_t first_row, size_t first_column, size_t block_rows, size_t block_columns, uint8_t *out,
                          size_t out_step, uint8_t *seen) {
    if (size != 2 && size != 4) return -1;
    size_t word = (size_t)size;
    for (size_t row = 0; row < rows; row++) {
        size_t down = (first_row + row) / block_rows;
        for (size_t column = 0; column < columns;) {
            size_t across = (first_column + column) / block_columns;
            size_t left = (across + 1) * block_columns - first_column - column;
            size_t count = columns - column < left ? columns - column : left;
            size_t block = down * wide + across;
            (size == 2 ? row_2 : row_4)(codes + row * columns + column, count, tables + block * CODES * word,
                                        seen + block * CODES, out + row * out_step + column * word);
            column += count;
        }
    }
    return 0;
}
