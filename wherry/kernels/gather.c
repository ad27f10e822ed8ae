/* Rows of a file that lie apart, read into an array with any strides, without a call of Python for each. */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { MOST_AXES = 32, AT_END = 1 };

/* Returns 0, AT_END if the file is too short, or a negative error number. */
static int read_all(int file, uint8_t *to, uint64_t count, uint64_t at) {
    while (count) {
        ssize_t done = pread(file, to, count, (off_t)at);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) return -errno;
        if (!done) return AT_END;
        to += done, at += (uint64_t)done, count -= (uint64_t)done;
    }
    return 0;
}

/* Read `length` bytes at each place of a grid with `extents`, whose places are `file_strides` apart in the file and
 * `out_strides` apart in memory. The places of the last axis are nearest to each other in the file.
 *
 * Places of the last axis are read together with the bytes between them, as many as fit `room` bytes of `held`; each by
 * itself if `room` is 0. Returns as `read_all`, or -EINVAL for too many axes. */
EXPORT int wherry_gather(int file, uint64_t offset, uint64_t length, int axes, const uint64_t *extents,
                         const uint64_t *file_strides, const uint64_t *out_strides, uint8_t *out, uint8_t *held,
                         uint64_t room) {
    if (axes < 1 || axes > MOST_AXES) return -EINVAL;
    for (int axis = 0; axis < axes; axis++)
        if (!extents[axis]) return 0;
    uint64_t rows = extents[axes - 1], step = file_strides[axes - 1], out_step = out_strides[axes - 1];
    uint64_t together = room > length && step ? (room - length) / step + 1 : 1;
    uint64_t at[MOST_AXES] = {0};
    for (;;) {
        uint64_t from = offset;
        uint8_t *to = out;
        for (int axis = 0; axis < axes - 1; axis++)
            from += at[axis] * file_strides[axis], to += at[axis] * out_strides[axis];
        for (uint64_t row = 0; row < rows; row += together) {
            uint64_t count = rows - row < together ? rows - row : together;
            if (count == 1) {
                int failed = read_all(file, to + row * out_step, length, from + row * step);
                if (failed) return failed;
                continue;
            }
            int failed = read_all(file, held, (count - 1) * step + length, from + row * step);
            if (failed) return failed;
            for (uint64_t i = 0; i < count; i++) memcpy(to + (row + i) * out_step, held + i * step, length);
        }
        int axis = axes - 2;
        for (; axis >= 0; axis--) {
            if (++at[axis] < extents[axis]) break;
            at[axis] = 0;
        }
        if (axis < 0) return 0;
    }
}
