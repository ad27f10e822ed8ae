/* Permutes the axes of arrays of 1-, 2-, 4- and 8-byte elements; planes are transposed in tiles that stay in registers. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { DEEP = 64 };    /* rows that are transposed together: their target runs fill whole cache lines */
enum { ACROSS = 512 }; /* columns before those of the next rows: so many runs of the target are in use */
enum { AHEAD = 32 };   /* columns from that which is transposed to that whose target run is fetched meanwhile */

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Fetch `count` runs of `length` bytes, which lie apart, into the second-level cache: they are written soon. */
static void fetch_runs(const uint8_t *runs, size_t apart, size_t count, size_t length) {
    for (size_t i = 0; i < count; i++)
        for (size_t at = 0; at < length; at += 64) __builtin_prefetch(runs + i * apart + at, 1, 2);
}

#define DEFINE_PLAIN(NAME, TYPE)                                                                              \
    static void NAME(const uint8_t *source, size_t source_stride, size_t rows, size_t columns, uint8_t *target, \
                     size_t target_stride) {                                                                  \
        for (size_t column = 0; column < columns; column++)                                                   \
            for (size_t row = 0; row < rows; row++)                                                           \
                memcpy(target + column * target_stride + row * sizeof(TYPE),                                  \
                       source + row * source_stride + column * sizeof(TYPE), sizeof(TYPE));                   \
    }
DEFINE_PLAIN(plain_1, uint8_t)
DEFINE_PLAIN(plain_2, uint16_t)
DEFINE_PLAIN(plain_4, uint32_t)
DEFINE_PLAIN(plain_8, uint64_t)

#if defined(__SSE2__)
#define LOAD(at) _mm_loadu_si128((const __m128i *)(at))
#define STORE(at, x) _mm_storeu_si128((__m128i *)(at), x)

static inline void tile_2(const uint8_t *s, size_t ss, uint8_t *t, size_t ts) { /* 8 x 8 */
    __m128i a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = LOAD(s + i * ss);
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
    }
    /* after three perfect shuffles of the rows by halves every column is a row */
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
        a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
    }
    for (int i = 0; i < 4; i++) {
        b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
        b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
    }
    for (int i = 0; i < 8; i++) STORE(t + i * ts, b[i]);
}

static inline void tile_1(const uint8_t *s, size_t ss, uint8_t *t, size_t ts) { /* 16 x 16 */
    __m128i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = LOAD(s + i * ss);
    for (int turn = 0; turn < 4; turn++) {
        for (int i = 0; i < 8; i++) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
        }
        memcpy(a, b, sizeof a);
    }
    for (int i = 0; i < 16; i++) STORE(t + i * ts, a[i]);
}

static inline void tile_4(const uint8_t *s, size_t ss, uint8_t *t, size_t ts) { /* 4 x 4 */
    __m128i a0 = LOAD(s), a1 = LOAD(s + ss), a2 = LOAD(s + 2 * ss), a3 = LOAD(s + 3 * ss);
    __m128i b0 = _mm_unpacklo_epi32(a0, a2), b1 = _mm_unpackhi_epi32(a0, a2);
    __m128i b2 = _mm_unpacklo_epi32(a1, a3), b3 = _mm_unpackhi_epi32(a1, a3);
    STORE(t, _mm_unpacklo_epi32(b0, b2));
    STORE(t + ts, _mm_unpackhi_epi32(b0, b2));
    STORE(t + 2 * ts, _mm_unpacklo_epi32(b1, b3));
    STORE(t + 3 * ts, _mm_unpackhi_epi32(b1, b3));
}

static inline void tile_8(const uint8_t *s, size_t ss, uint8_t *t, size_t ts) { /* 2 x 2 */
    __m128i a0 = LOAD(s), a1 = LOAD(s + ss);
    STORE(t, _mm_unpacklo_epi64(a0, a1));
    STORE(t + ts, _mm_unpackhi_epi64(a0, a1));
}

#define DEFINE_TILED(NAME, PLAIN, TILE, SIZE, SIDE)                                                             \
    static void NAME(const uint8_t *source, size_t ss, size_t rows, size_t columns, uint8_t *target, size_t ts) { \
        size_t whole_rows = rows - rows % SIDE, whole_columns = columns - columns % SIDE;                        \
        for (size_t left = 0; left < whole_columns; left += ACROSS) {                                           \
            size_t right = least(left + ACROSS, whole_columns);                                                 \
            for (size_t first = 0; first < whole_rows; first += DEEP) {                                         \
                size_t stop = least(first + DEEP, whole_rows);                                                  \
                for (size_t column = left; column < right; column += SIDE) {                                    \
                    if (column + AHEAD + SIDE <= right)                                                         \
                        fetch_runs(target + (column + AHEAD) * ts + first * SIZE, ts, SIDE, (stop - first) * SIZE); \
                    for (size_t row = first; row < stop; row += SIDE)                                           \
                        TILE(source + row * ss + column * SIZE, ss, target + column * ts + row * SIZE, ts);     \
                }                                                                                               \
            }                                                                                                   \
        }                                                                                                       \
        PLAIN(source + whole_columns * SIZE, ss, whole_rows, columns - whole_columns,                           \
              target + whole_columns * ts, ts);                                                                 \
        PLAIN(source + whole_rows * ss, ss, rows - whole_rows, columns, target + whole_rows * SIZE, ts);        \
    }
DEFINE_TILED(tiled_1, plain_1, tile_1, 1, 16)
DEFINE_TILED(tiled_2, plain_2, tile_2, 2, 8)
DEFINE_TILED(tiled_4, plain_4, tile_4, 4, 4)
DEFINE_TILED(tiled_8, plain_8, tile_8, 8, 2)
#else
#define tiled_1 plain_1
#define tiled_2 plain_2
#define tiled_4 plain_4
#define tiled_8 plain_8
#endif

typedef void Transpose(const uint8_t *, size_t, size_t, size_t, uint8_t *, size_t);

static Transpose *transpose_of(int size) {
    return size == 1 ? tiled_1 : size == 2 ? tiled_2 : size == 4 ? tiled_4 : size == 8 ? tiled_8 : NULL;
}

/* Transpose a few rows (at most DEEP), which are in the cache, of elements of 2 or 4 bytes: the runs of the target are written
 * when they are whole, as those that lie a power of two apart drive each other from the cache. */
void transpose_rows(const uint8_t *source, size_t source_stride, size_t rows, size_t columns, uint8_t *target,
                    size_t target_stride, int size) {
    enum { MOST = 8 << 10 };
    _Alignas(64) uint8_t turned[MOST];
    size_t word = (size_t)size, run = DEEP * word, wide;
    for (size_t column = 0; column < columns; column += wide, target += wide * target_stride) {
        wide = least(MOST / run, columns - column);
        fetch_runs(target, target_stride, wide, rows * word);
        transpose_of(size)(source + column * word, source_stride, rows, wide, turned, run);
        for (size_t i = 0; i < wide; i++) memcpy(target + i * target_stride, turned + i * run, rows * word);
    }
}

/* Copy one plane element by element, for strides that no tile has. */
static void scattered(const uint8_t *source, const int64_t *ss, uint8_t *target, const int64_t *ts, const uint64_t *extents,
                      int size) {
    for (uint64_t i = 0; i < extents[0]; i++)
        for (uint64_t j = 0; j < extents[1]; j++)
            memcpy(target + (int64_t)i * ts[0] + (int64_t)j * ts[1], source + (int64_t)i * ss[0] + (int64_t)j * ss[1],
                   (size_t)size);
}

enum { MOST_AXES = 32 };

/* Copy an array with strides into another: `source` and `target` have the same axes, with `extents`; strides are in bytes.
 * The last axis is the innermost of the target. Returns 0, or -1 for a size of elements other than 1, 2, 4 and 8, or too
 * many axes. */
EXPORT int wherry_permute(const uint8_t *source, const int64_t *source_strides, uint8_t *target,
                          const int64_t *target_strides, const uint64_t *extents, int axes, int size) {
    Transpose *transpose = transpose_of(size);
    if (!transpose || axes > MOST_AXES) return -1;
    for (int axis = 0; axis < axes; axis++)
        if (!extents[axis]) return 0;
    if (!axes) {
        memcpy(target, source, (size_t)size);
        return 0;
    }
    /* The plane of the innermost axes of source and target; rows alone where these are the same axis. */
    int last = axes - 1, inner = last;
    for (int axis = axes - 1; axis >= 0; axis--)
        if (source_strides[axis] < source_strides[inner] && extents[axis] > 1) inner = axis;
    int is_row = inner == last || extents[last] == 1;
    if (is_row) inner = last;
    int is_tiled = !is_row && source_strides[inner] == size && target_strides[last] == size;
    int is_copied = is_row && source_strides[last] == size && target_strides[last] == size;
    uint64_t at[MOST_AXES] = {0};
    for (;;) {
        const uint8_t *from = source;
        uint8_t *to = target;
        for (int axis = 0; axis < axes; axis++)
            from += (int64_t)at[axis] * source_strides[axis], to += (int64_t)at[axis] * target_strides[axis];
        if (is_copied) {
            memcpy(to, from, (size_t)extents[last] * (size_t)size);
        } else if (is_tiled) {
            transpose(from, (size_t)source_strides[last], extents[last], extents[inner], to, (size_t)target_strides[inner]);
        } else {
            int64_t ss[2] = {is_row ? 0 : source_strides[inner], source_strides[last]};
            int64_t ts[2] = {is_row ? 0 : target_strides[inner], target_strides[last]};
            uint64_t plane[2] = {is_row ? 1 : extents[inner], extents[last]};
            scattered(from, ss, to, ts, plane, size);
        }
        int axis = axes - 1;
        for (; axis >= 0; axis--) {
            if (axis == last || axis == inner) continue;
            if (++at[axis] < extents[axis]) break;
            at[axis] = 0;
        }
        if (axis < 0) return 0;
    }
}
