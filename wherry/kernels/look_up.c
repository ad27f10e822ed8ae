/* Replaces codes of one byte, or of half of one, by words of tables, one table for each block of a matrix. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* In tree_hash.c: how many chunks are hashed side by side, 16 with AVX-512. */
int chosen_lanes(void);
/* In transpose.c. */
void transpose_rows(const uint8_t *source, size_t source_stride, size_t rows, size_t columns, uint8_t *target,
                    size_t target_stride, int size);

/* A rectangle of codes of one block, and where its words go: rows are `step` and `out_step` bytes apart, and begin with code
 * `from`. `order` and `seen` are those of the block: see wherry_look_up. */
typedef struct {
    const uint8_t *codes;
    size_t step, from, rows, count;
    uint8_t *out;
    size_t out_step;
    const uint8_t *order;
    uint8_t *seen;
} Rectangle;

static uint8_t higher(uint8_t a, uint8_t b) { return a > b ? a : b; }

/* The place of each code in the order of its block. */
static void rank(const Rectangle *r, uint8_t ranks[256]) {
    memset(ranks, 0, 256);
    for (int place = 0; r->order && place < 256; place++) ranks[r->order[place]] = (uint8_t)place;
}

/* Look up codes of one byte. */
#define DEFINE_WHOLE(NAME, WORD)                                               \
    static void NAME(const Rectangle *r, const void *table) {                  \
        const WORD *words = table;                                             \
        uint8_t ranks[256], highest = 0;                                       \
        rank(r, ranks);                                                        \
        for (size_t row = 0; row < r->rows; row++) {                           \
            const uint8_t *codes = r->codes + row * r->step + r->from;         \
            WORD *to = (WORD *)(r->out + row * r->out_step);                   \
            for (size_t i = 0; i < r->count; i++) {                            \
                to[i] = words[codes[i]];                                       \
                highest = higher(highest, ranks[codes[i]]);                    \
            }                                                                  \
        }                                                                      \
        if (r->order) r->seen[r->order[highest]] = 1;                          \
    }
DEFINE_WHOLE(whole_2, uint16_t)
DEFINE_WHOLE(whole_4, uint32_t)

/* Look up codes of half a byte, of two in a byte the lower half first. */
#define DEFINE_HALVES(NAME, WORD)                                              \
    static void NAME(const Rectangle *r, const void *table) {                  \
        const WORD *words = table;                                             \
        uint32_t found = 0;                                                    \
        for (size_t row = 0; row < r->rows; row++) {                           \
            const uint8_t *codes = r->codes + row * r->step;                   \
            WORD *to = (WORD *)(r->out + row * r->out_step);                   \
            size_t at = r->from, stop = r->from + r->count;                    \
            if (at % 2 && at < stop) {                                         \
                uint8_t code = codes[at / 2] >> 4;                             \
                *to++ = words[code], found |= 1u << code, at++;                \
            }                                                                  \
            for (; at + 2 <= stop; at += 2, to += 2) {                         \
                uint8_t low = codes[at / 2] & 15, high = codes[at / 2] >> 4;   \
                to[0] = words[low], to[1] = words[high];                       \
                found |= 1u << low | 1u << high;                               \
            }                                                                  \
            if (at < stop) {                                                   \
                uint8_t code = codes[at / 2] & 15;                             \
                *to = words[code], found |= 1u << code;                        \
            }                                                                  \
        }                                                                      \
        for (int code = 0; code < 16; code++) r->seen[code] |= found >> code & 1; \
    }
DEFINE_HALVES(halves_2, uint16_t)
DEFINE_HALVES(halves_4, uint32_t)

#if defined(__x86_64__)
#include <immintrin.h>

#define VECTOR __attribute__((target("avx512f,avx512bw,avx512vbmi")))

/* A table of 256 bytes in registers. */
typedef struct {
    __m512i part[4];
} Bytes;

VECTOR static inline Bytes bytes_of(const uint8_t *table) {
    Bytes bytes;
    for (int i = 0; i < 4; i++) bytes.part[i] = _mm512_loadu_si512(table + 64 * i);
    return bytes;
}

/* The bytes of a table at 64 places; their highest bits choose a half of it. */
VECTOR static inline __m512i bytes_at(const Bytes *bytes, __m512i places) {
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(places),
                                  _mm512_permutex2var_epi8(bytes->part[0], places, bytes->part[1]),
                                  _mm512_permutex2var_epi8(bytes->part[2], places, bytes->part[3]));
}

/* As whole_2, with 64 codes at a time. */
VECTOR static void whole_2_by_64(const Rectangle *r, const void *table) {
    uint8_t ranks[256], lower[256], upper[256];
    rank(r, ranks);
    for (int code = 0; code < 256; code++) {
        lower[code] = ((const uint8_t *)table)[2 * code];
        upper[code] = ((const uint8_t *)table)[2 * code + 1];
    }
    const Bytes low = bytes_of(lower), high = bytes_of(upper), places = bytes_of(ranks);
    const __m512i first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    __m512i highest = _mm512_setzero_si512();
    for (size_t row = 0; row < r->rows; row++) {
        const uint8_t *codes = r->codes + row * r->step + r->from;
        uint8_t *to = r->out + row * r->out_step;
        for (size_t i = 0; i < r->count; i += 64) {
            __mmask64 wanted = r->count - i < 64 ? (1ULL << (r->count - i)) - 1 : ~0ULL;
            __m512i here = _mm512_maskz_loadu_epi8(wanted, codes + i);
            __m512i a = bytes_at(&low, here), b = bytes_at(&high, here);
            __m512i c = _mm512_unpacklo_epi8(a, b), d = _mm512_unpackhi_epi8(a, b);
            _mm512_mask_storeu_epi16(to + 2 * i, (__mmask32)wanted, _mm512_permutex2var_epi64(c, first, d));
            _mm512_mask_storeu_epi16(to + 2 * i + 64, (__mmask32)(wanted >> 32), _mm512_permutex2var_epi64(c, second, d));
            highest = _mm512_mask_max_epu8(highest, wanted, highest, bytes_at(&places, here));
        }
    }
    uint8_t each[64], highest_of_all = 0;
    _mm512_storeu_si512(each, highest);
    for (int i = 0; i < 64; i++) highest_of_all = higher(highest_of_all, each[i]);
    if (r->order) r->seen[r->order[highest_of_all]] = 1;
}
#endif

typedef void LookUp(const Rectangle *, const void *);

static LookUp *look_up_of(int bits, int size) {
    if (bits == 4) return size == 2 ? halves_2 : halves_4;
#if defined(__x86_64__)
    if (size == 2 && chosen_lanes() == 16 && __builtin_cpu_supports("avx512vbmi")) return whole_2_by_64;
#endif
    return size == 2 ? whole_2 : whole_4;
}

enum { DEEP = 64, WIDE = 256 }; /* rows and bytes of what is transposed while it is in the cache */

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Look up a matrix of codes.
 *
 * The matrix has `rows` rows of `columns` codes of `bits` bits, 8 or 4; rows are `step` bytes apart and begin with code `skip`
 * of their bytes. Blocks have `block_rows` rows and `block_columns` columns; the first code is at (`first_row`, `first_column`)
 * of the first block. `tables` has 256 or 16 words of `size` bytes for each block, in rows of `wide` blocks.
 *
 * In `out` rows are `out_step` bytes apart, and words of a row lie together; or columns are, and words of a column do, if
 * `turned`.
 *
 * `seen` has a byte for each word of the tables, which becomes 1 where its code of 4 bits occurs. Of codes of 8 bits it does
 * so at some that occur: with `orders`, which has all codes of each block in any order, at the last of them. Returns 0, or -1
 * for other bits, and for a size other than 2 and 4. */
EXPORT int wherry_look_up(const uint8_t *codes, size_t step, size_t skip, int bits, size_t rows, size_t columns,
                          const uint8_t *tables, int size, size_t wide, size_t first_row, size_t first_column,
                          size_t block_rows, size_t block_columns, uint8_t *out, size_t out_step, int turned,
                          const uint8_t *orders, uint8_t *seen) {
    if ((size != 2 && size != 4) || (bits != 8 && bits != 4)) return -1;
    LookUp *look_up = look_up_of(bits, size);
    size_t word = (size_t)size, count_of_codes = (size_t)1 << bits;
    _Alignas(64) uint8_t tile[DEEP][WIDE];
    /* Rows that are looked up together; if `turned`, all, so that few pages of the target are in use. */
    size_t most = turned ? rows : DEEP;
    for (size_t top = 0; top < rows; top += most)
        for (size_t column = 0, count; column < columns; column += count) {
            size_t across = (first_column + column) / block_columns;
            count = least(columns - column, (across + 1) * block_columns - first_column - column);
            if (turned) count = least(count, WIDE / word);
            for (size_t strip = top, deep; strip < least(top + most, rows); strip += deep) {
                deep = least(DEEP, rows - strip);
                for (size_t row = strip, some; row < strip + deep; row += some) {
                    size_t down = (first_row + row) / block_rows, table = (down * wide + across) * count_of_codes;
                    some = least(strip + deep - row, (down + 1) * block_rows - first_row - row);
                    Rectangle here = {.codes = codes + row * step, .step = step, .from = skip + column, .rows = some,
                                      .count = count, .out = out + row * out_step + column * word, .out_step = out_step,
                                      .order = orders ? orders + table : NULL, .seen = seen + table};
                    if (turned) here.out = tile[row - strip], here.out_step = WIDE;
                    look_up(&here, tables + table * word);
                }
                if (turned)
                    transpose_rows(tile[0], WIDE, deep, count, out + column * out_step + strip * word, out_step, size);
            }
        }
    return 0;
}
