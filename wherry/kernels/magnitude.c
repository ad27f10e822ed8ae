/* Counts words whose magnitude, which is all bits but the highest, is above a limit: the NaN of a floating-point type. */
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* In tree_hash.c: how many chunks are hashed side by side, 16 with AVX-512, 8 with AVX2. */
int chosen_lanes(void);

enum { BLOCK = 4096 }; /* bytes that are looked at twice if there is something to count */

/* Nearly all blocks have no such word, which their largest magnitude tells. */
#define DEFINE_ABOVE(NAME, WORD, TARGET)                                                   \
    TARGET static uint64_t NAME(const uint8_t *data, uint64_t count, uint64_t limit) {     \
        typedef WORD word __attribute__((aligned(1), may_alias));                          \
        const word *words = (const word *)data;                                            \
        const WORD mask = (WORD)-1 >> 1;                                                   \
        uint64_t found = 0;                                                                \
        for (uint64_t at = 0, stop; at < count; at = stop) {                               \
            stop = count - at > BLOCK / sizeof(WORD) ? at + BLOCK / sizeof(WORD) : count;  \
            WORD largest = 0;                                                              \
            for (uint64_t i = at; i < stop; i++) {                                         \
                WORD magnitude = words[i] & mask;                                          \
                largest = magnitude > largest ? magnitude : largest;                       \
            }                                                                              \
            if (largest <= limit) continue;                                                \
            for (uint64_t i = at; i < stop; i++) found += (WORD)(words[i] & mask) > limit; \
        }                                                                                  \
        return found;                                                                      \
    }

#define DEFINE_SIZES(SUFFIX, TARGET)              \
    DEFINE_ABOVE(above_1##SUFFIX, uint8_t, TARGET)  \
    DEFINE_ABOVE(above_2##SUFFIX, uint16_t, TARGET) \
    DEFINE_ABOVE(above_4##SUFFIX, uint32_t, TARGET) \
    DEFINE_ABOVE(above_8##SUFFIX, uint64_t, TARGET)
DEFINE_SIZES(, )
#if defined(__x86_64__)
DEFINE_SIZES(_avx2, __attribute__((target("avx2"))))
DEFINE_SIZES(_avx512, __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq"))))
#endif

typedef uint64_t Above(const uint8_t *, uint64_t, uint64_t);

/* Count the words of `size` bytes, in the byte order of the machine and anywhere in memory, whose magnitude is above
 * `limit`. Returns -2 for other sizes. */
EXPORT int64_t wherry_above(const uint8_t *data, uint64_t count, int size, uint64_t limit) {
    int width = size == 1 ? 0 : size == 2 ? 1 : size == 4 ? 2 : size == 8 ? 3 : -1;
    if (width < 0) return -2;
    Above *const plain[] = {above_1, above_2, above_4, above_8};
#if defined(__x86_64__)
    Above *const avx2[] = {above_1_avx2, above_2_avx2, above_4_avx2, above_8_avx2};
    Above *const avx512[] = {above_1_avx512, above_2_avx512, above_4_avx512, above_8_avx512};
    if (chosen_lanes() >= 16) return (int64_t)avx512[width](data, count, limit);
    if (chosen_lanes() >= 8) return (int64_t)avx2[width](data, count, limit);
#endif
    return (int64_t)plain[width](data, count, limit);
}
