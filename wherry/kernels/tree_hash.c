/* BLAKE3 of leaves whose bytes arrive in any order, from several threads.
 *
 * Written from the specification: "BLAKE3: one function, fast everywhere" (O'Connor, Aumasson, Neves, Wilcox-O'Hearn,
 * 2021), sections 2.1 to 2.5. A chunk of 1024 bytes has a chaining value that depends on its bytes and on its index in
 * the leaf alone, so chunks are hashed side by side, one lane of a vector for each, and 32 bytes are kept of each until
 * those of 8 chunks are there and are joined; what is left is joined when the leaf is complete. A piece that begins or
 * ends inside a chunk leaves its bytes in an edge, a buffer of one chunk, until the rest of the chunk has come.
 *
 * What has come of a leaf can be given to another process, which has other bytes of it: see wherry_leaves_export.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { CHUNK = 1024, BLOCK = 64, VALUE = 32, ROUNDS = 7 };
enum { CHUNK_START = 1, CHUNK_END = 2, PARENT = 4, ROOT = 8 };

static const uint32_t IV[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                               0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

/* The order of the message words in each round: the permutation of section 2.2, applied again and again. */
static const uint8_t ORDER[ROUNDS][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};

static inline uint32_t word_at(const uint8_t *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

static inline void put_word(uint8_t *bytes, uint32_t word) {
    for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)(word >> 8 * i);
}

/* A quarter of a mixing step in four columns (or diagonals) side by side, so that each waits for no result of its own. */
#define STEP(v, A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, w, x, y, z, turn, back)    \
    do {                                                                                  \
        v[A] += v[B] + (w); v[E] += v[F] + (x); v[I] += v[J] + (y); v[M] += v[N] + (z);   \
        v[D] = ROTATE(v[D] ^ v[A], turn); v[H] = ROTATE(v[H] ^ v[E], turn);               \
        v[L] = ROTATE(v[L] ^ v[I], turn); v[P] = ROTATE(v[P] ^ v[M], turn);               \
        v[C] += v[D]; v[G] += v[H]; v[K] += v[L]; v[O] += v[P];                           \
        v[B] = ROTATE(v[B] ^ v[C], back); v[F] = ROTATE(v[F] ^ v[G], back);               \
        v[J] = ROTATE(v[J] ^ v[K], back); v[N] = ROTATE(v[N] ^ v[O], back);               \
    } while (0)

#define ROUND(v, m, r)                                                                                                  \
    do {                                                                                                                \
        STEP(v, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, m[r[0]], m[r[2]], m[r[4]], m[r[6]], 16, 12);       \
        STEP(v, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, m[r[1]], m[r[3]], m[r[5]], m[r[7]], 8, 7);         \
        STEP(v, 0, 5, 10, 15, 1, 6, 11, 12, 2, 7, 8, 13, 3, 4, 9, 14, m[r[8]], m[r[10]], m[r[12]], m[r[14]], 16, 12);    \
        STEP(v, 0, 5, 10, 15, 1, 6, 11, 12, 2, 7, 8, 13, 3, 4, 9, 14, m[r[9]], m[r[11]], m[r[13]], m[r[15]], 8, 7);      \
    } while (0)

#define ROTATE(x, n) (((x) >> (n)) | ((x) << (32 - (n))))

/* One compression: `value` becomes the chaining value. */
static void compress(uint32_t value[8], const uint8_t block[BLOCK], uint32_t length, uint64_t index, uint32_t flags) {
    uint32_t m[16], v[16];
    for (int i = 0; i < 16; i++) m[i] = word_at(block + 4 * i);
    memcpy(v, value, 32);
    memcpy(v + 8, IV, 16);
    v[12] = (uint32_t)index, v[13] = (uint32_t)(index >> 32), v[14] = length, v[15] = flags;
    for (int r = 0; r < ROUNDS; r++) ROUND(v, m, ORDER[r]);
    for (int i = 0; i < 8; i++) value[i] = v[i] ^ v[i + 8];
}

/* The chaining value of a chunk of at most 1024 bytes; with `flags` ROOT, the hash of an input of one chunk. */
static void hash_chunk(const uint8_t *data, size_t length, uint64_t index, uint32_t flags, uint8_t out[VALUE]) {
    uint32_t value[8];
    memcpy(value, IV, 32);
    size_t done = 0;
    do {
        uint8_t block[BLOCK] = {0};
        size_t here = length - done < BLOCK ? length - done : BLOCK;
        if (here) memcpy(block, data + done, here);
        int last = done + here == length;
        compress(value, block, (uint32_t)here, index, (done == 0) * CHUNK_START | last * (CHUNK_END | flags));
        done += here;
    } while (done < length);
    for (int i = 0; i < 8; i++) put_word(out + 4 * i, value[i]);
}

/* Hashes of LANES inputs of `blocks` whole blocks each. */
#define DEFINE_LANES(NAME, LANES, TARGET, VECTOR)                                                                     \
    typedef uint32_t VECTOR __attribute__((vector_size(4 * LANES)));                                                  \
    TARGET static void NAME(const uint8_t *const *data, const uint32_t *index, int blocks, uint32_t flags,            \
                            uint32_t first, uint32_t last, uint8_t *const *out) {                                     \
        VECTOR value[8], counter;                                                                                     \
        for (int i = 0; i < 8; i++) value[i] = (VECTOR){0} + IV[i];                                                   \
        for (int lane = 0; lane < LANES; lane++) counter[lane] = index[lane];                                         \
        for (int block = 0; block < blocks; block++) {                                                                \
            VECTOR m[16], v[16];                                                                                      \
            const uint8_t *words[LANES];                                                                              \
            for (int lane = 0; lane < LANES; lane++) words[lane] = data[lane] + block * BLOCK;                        \
            TRANSPOSE_##LANES(words, m);                                                                              \
            for (int i = 0; i < 8; i++) v[i] = value[i];                                                              \
            for (int i = 0; i < 4; i++) v[8 + i] = (VECTOR){0} + IV[i];                                               \
            v[12] = counter, v[13] = (VECTOR){0}, v[14] = (VECTOR){0} + (uint32_t)BLOCK;                              \
            v[15] = (VECTOR){0} + (flags | (block == 0 ? first : 0) | (block == blocks - 1 ? last : 0));              \
            ROUND(v, m, ORDER[0]); ROUND(v, m, ORDER[1]); ROUND(v, m, ORDER[2]); ROUND(v, m, ORDER[3]);               \
            ROUND(v, m, ORDER[4]); ROUND(v, m, ORDER[5]); ROUND(v, m, ORDER[6]);                                      \
            for (int i = 0; i < 8; i++) value[i] = v[i] ^ v[i + 8];                                                   \
        }                                                                                                             \
        for (int lane = 0; lane < LANES; lane++)                                                                      \
            for (int i = 0; i < 8; i++) put_word(out[lane] + 4 * i, value[i][lane]);                                  \
    }

/* The words of one block of each lane: m[i] holds word i of every lane. */
#define TRANSPOSE_4(words, m)                        \
    for (int i = 0; i < 16; i++)                     \
        for (int lane = 0; lane < 4; lane++) m[i][lane] = word_at(words[lane] + 4 * i)

#if defined(__x86_64__)
#include <immintrin.h>

/* Rows of 8 words to columns: pairs of words, then pairs of pairs, then halves change places. */
#define TRANSPOSE_8(words, m)                                                                      \
    for (int half = 0; half < 2; half++) {                                                         \
        __m256i r[8], t[8];                                                                        \
        for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256((const __m256i *)(words[i] + 32 * half)); \
        for (int i = 0; i < 8; i += 2) {                                                           \
            t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);                                          \
            t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);                                      \
        }                                                                                          \
        for (int i = 0; i < 8; i += 4)                                                             \
            for (int k = 0; k < 2; k++) {                                                          \
                r[i + 2 * k] = _mm256_unpacklo_epi64(t[i + k], t[i + 2 + k]);                      \
                r[i + 2 * k + 1] = _mm256_unpackhi_epi64(t[i + k], t[i + 2 + k]);                  \
            }                                                                                      \
        for (int i = 0; i < 4; i++) {                                                              \
            m[8 * half + i] = (v8)_mm256_permute2x128_si256(r[i], r[4 + i], 0x20);                 \
            m[8 * half + 4 + i] = (v8)_mm256_permute2x128_si256(r[i], r[4 + i], 0x31);             \
        }                                                                                          \
    }

#define TRANSPOSE_16(words, m)                                                     \
    do {                                                                           \
        __m512i r[16], t[16];                                                      \
        for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(words[i]);           \
        for (int i = 0; i < 16; i += 2) {                                          \
            t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);                          \
            t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);                      \
        }                                                                          \
        for (int i = 0; i < 16; i += 4)                                            \
            for (int k = 0; k < 2; k++) {                                          \
                r[i + 2 * k] = _mm512_unpacklo_epi64(t[i + k], t[i + 2 + k]);      \
                r[i + 2 * k + 1] = _mm512_unpackhi_epi64(t[i + k], t[i + 2 + k]);  \
            }                                                                      \
        for (int i = 0; i < 4; i++) {                                              \
            t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);                     \
            t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);                 \
            t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);            \
            t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);           \
        }                                                                          \
        for (int i = 0; i < 8; i++) {                                              \
            m[i] = (v16)_mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);                \
            m[8 + i] = (v16)_mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);            \
        }                                                                          \
    } while (0)
#endif

DEFINE_LANES(lanes_4, 4, , v4)
#if defined(__x86_64__)
DEFINE_LANES(lanes_8, 8, __attribute__((target("avx2"))), v8)
DEFINE_LANES(lanes_16, 16, __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq"))), v16)
#endif

/* How many chunks are hashed side by side: what this processor can, or less if a test asks for it. */
static int lanes;

static int lanes_of_this_machine(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
        return 16;
    if (__builtin_cpu_supports("avx2")) return 8;
#endif
    return 4;
}

/* Choose the number of lanes: at most `wanted`, or as many as this processor has for 0. Returns what was chosen. */
EXPORT int wherry_lanes(int wanted) {
    int have = lanes_of_this_machine();
    lanes = wanted && wanted < have ? wanted : have;
    return lanes;
}

int chosen_lanes(void) { return lanes ? lanes : wherry_lanes(0); }

/* Inputs of equal length that wait to be hashed together. */
enum { WIDEST = 16 };
typedef struct {
    int count, blocks;
    uint32_t flags, first, last;
    const uint8_t *data[WIDEST];
    uint32_t index[WIDEST];
    uint8_t *out[WIDEST];
} Queue;

static void hash_queue(Queue *q) {
    int done = 0;
#if defined(__x86_64__)
    for (; lanes >= 16 && q->count - done >= 16; done += 16)
        lanes_16(q->data + done, q->index + done, q->blocks, q->flags, q->first, q->last, q->out + done);
    for (; lanes >= 8 && q->count - done >= 8; done += 8)
        lanes_8(q->data + done, q->index + done, q->blocks, q->flags, q->first, q->last, q->out + done);
#endif
    for (; lanes >= 4 && q->count - done >= 4; done += 4)
        lanes_4(q->data + done, q->index + done, q->blocks, q->flags, q->first, q->last, q->out + done);
    for (; done < q->count; done++) {
        uint32_t value[8];
        memcpy(value, IV, 32);
        for (int block = 0; block < q->blocks; block++)
            compress(value, q->data[done] + block * BLOCK, BLOCK, q->index[done],
                     q->flags | (block == 0 ? q->first : 0) | (block == q->blocks - 1 ? q->last : 0));
        for (int i = 0; i < 8; i++) put_word(q->out[done] + 4 * i, value[i]);
    }
    q->count = 0;
}

static inline void put(Queue *q, const uint8_t *data, uint32_t index, uint8_t *out) {
    q->data[q->count] = data, q->index[q->count] = index, q->out[q->count] = out;
    if (++q->count == WIDEST) hash_queue(q);
}

/* The hash of a leaf from the values of its chunks (two or more), which are overwritten. */
static void join(uint8_t *values, size_t count, uint8_t *out) {
    while (count > 2) {
        size_t pairs = count / 2;
        /* A parent may be written where a pair was read that is in the same queue: all of a queue is read first. */
        Queue parents = {.blocks = 1, .flags = PARENT};
        for (size_t i = 0; i < pairs; i++) put(&parents, values + i * BLOCK, 0, values + i * VALUE);
        hash_queue(&parents);
        if (count % 2) memmove(values + pairs * VALUE, values + (count - 1) * VALUE, VALUE);
        count = pairs + count % 2;
    }
    Queue root = {.blocks = 1, .flags = PARENT | ROOT};
    put(&root, values, 0, out);
    hash_queue(&root);
}

enum { LEAF = 4 << 20, CHUNKS = LEAF / CHUNK, WORDS = CHUNK / 64, LEVELS = 12 }; /* CHUNKS is 1 << LEVELS */
enum { LOW = 3, PAGE = 1 << LOW, PAGES = CHUNKS / PAGE };

/* The bytes of a chunk that came in several pieces. */
typedef struct {
    uint64_t have[WORDS]; /* one bit for each byte */
    uint8_t bytes[CHUNK];
} Edge;

typedef struct Leaf Leaf;

/* Chunks that lie together, of which some have come and not all. */
typedef struct {
    uint8_t values[PAGE][VALUE];
    Edge *edges[PAGE];
    Leaf *leaf;
    uint32_t number; /* its place in the leaf */
    int users;       /* calls that write values at this moment; -1 when it is being joined */
} Page;

/* A leaf of which some bytes have come. */
struct Leaf {
    Page *pages[PAGES];         /* NULL before the first byte and after the last */
    uint64_t have[CHUNKS / 64]; /* one bit for each chunk that is hashed */
    uint16_t *places;           /* of each subtree of PAGE chunks or more: 1 + its place in `joined`, 0 if it is not there */
    uint16_t *low_places;       /* the same of smaller ones; only of those that another process has hashed */
    uint8_t *joined;            /* values of subtrees */
    uint32_t subtrees, room;    /* of these, and how many have room */
    uint32_t count, left;       /* chunks that it has, and those that are not hashed */
    int users;                  /* calls that have bytes of it at this moment */
    int foreign;                /* whether another process has hashed subtrees */
};

typedef struct {
    uint64_t nbytes;
    size_t count;
    Leaf **leaves; /* NULL for one that has not begun, or is over */
    uint8_t *over; /* whether the hash of each leaf is known */
    pthread_mutex_t lock;
} Leaves;

static uint64_t bytes_of(const Leaves *all, size_t leaf) {
    uint64_t start = (uint64_t)leaf * LEAF;
    return all->nbytes - start < LEAF ? all->nbytes - start : LEAF;
}

static uint32_t chunks_of(const Leaves *all, size_t leaf) {
    return (uint32_t)((bytes_of(all, leaf) + CHUNK - 1) / CHUNK);
}

/* Bytes of all leaves that have begun and are not over, in this process. */
static int64_t open_bytes;

static void *kept(void *memory, int64_t bytes) {
    if (memory) __atomic_add_fetch(&open_bytes, bytes, __ATOMIC_RELAXED);
    return memory;
}

static void freed(void *memory, int64_t bytes) {
    if (memory) __atomic_sub_fetch(&open_bytes, bytes, __ATOMIC_RELAXED);
    free(memory);
}

EXPORT int64_t wherry_leaves_bytes(void) { return __atomic_load_n(&open_bytes, __ATOMIC_RELAXED); }

enum { HIGH_BYTES = 2 * PAGES * sizeof(uint16_t), LOW_BYTES = 2 * CHUNKS * sizeof(uint16_t) };

static void drop_page(Leaf *leaf, uint32_t number) {
    Page *page = leaf->pages[number];
    if (!page) return;
    for (int i = 0; i < PAGE; i++) freed(page->edges[i], sizeof(Edge));
    freed(page, sizeof *page);
    leaf->pages[number] = NULL;
}

static void drop(Leaf *leaf) {
    if (!leaf) return;
    for (uint32_t i = 0; i < PAGES; i++) drop_page(leaf, i);
    freed(leaf->places, HIGH_BYTES), freed(leaf->low_places, LOW_BYTES);
    freed(leaf->joined, (int64_t)leaf->room * VALUE);
    freed(leaf, sizeof *leaf);
}

/* Nothing is known of any leaf of a tensor with this many bytes. NULL if there is no memory. */
EXPORT Leaves *wherry_leaves_new(uint64_t nbytes) {
    chosen_lanes();
    Leaves *all = calloc(1, sizeof *all);
    if (!all) return NULL;
    all->nbytes = nbytes, all->count = (size_t)((nbytes + LEAF - 1) / LEAF);
    all->leaves = calloc(all->count + 1, sizeof *all->leaves);
    all->over = calloc(all->count + 1, 1);
    if (!all->leaves || !all->over || pthread_mutex_init(&all->lock, NULL)) {
        free(all->leaves), free(all->over), free(all);
        return NULL;
    }
    return all;
}

EXPORT void wherry_leaves_free(Leaves *all) {
    if (!all) return;
    for (size_t i = 0; i < all->count; i++) drop(all->leaves[i]);
    pthread_mutex_destroy(&all->lock);
    free(all->leaves), free(all->over), free(all);
}

/* A leaf's hash is known from elsewhere: its bytes are not needed. */
EXPORT void wherry_leaves_skip(Leaves *all, size_t leaf) {
    pthread_mutex_lock(&all->lock);
    if (leaf < all->count) all->over[leaf] = 1;
    pthread_mutex_unlock(&all->lock);
}

static Leaf *begin(const Leaves *all, size_t number) {
    Leaf *leaf = kept(calloc(1, sizeof *leaf), sizeof *leaf);
    if (leaf) leaf->count = leaf->left = chunks_of(all, number);
    return leaf;
}

static int are_marked(const Leaf *leaf, uint32_t first, uint32_t width) {
    if (width < 64) return (leaf->have[first / 64] >> first % 64 & ((1ULL << width) - 1)) == (1ULL << width) - 1;
    for (uint32_t word = first / 64; word < (first + width) / 64; word++)
        if (leaf->have[word] != ~0ULL) return 0;
    return 1;
}

static int is_marked(const Leaf *leaf, uint32_t chunk) { return leaf->have[chunk / 64] >> chunk % 64 & 1; }

/* Count chunks [from, to) whose values are written; each once only. */
static void mark(Leaf *leaf, uint32_t from, uint32_t to) {
    for (uint32_t at = from; at < to;) {
        uint32_t stop = (at / 64 + 1) * 64 < to ? (at / 64 + 1) * 64 : to, width = stop - at;
        uint64_t bits = (width == 64 ? ~0ULL : (1ULL << width) - 1) << at % 64, fresh = bits & ~leaf->have[at / 64];
        leaf->have[at / 64] |= bits;
        leaf->left -= (uint32_t)__builtin_popcountll(fresh);
        at = stop;
    }
}

/* The page of a chunk; NULL without memory. */
static Page *page_of(Leaf *leaf, uint32_t chunk) {
    Page **page = &leaf->pages[chunk / PAGE];
    if (*page || !(*page = kept(malloc(sizeof **page), sizeof **page))) return *page;
    memset((*page)->edges, 0, sizeof (*page)->edges);
    (*page)->leaf = leaf, (*page)->number = chunk / PAGE, (*page)->users = 0;
    return *page;
}

/* Copy bytes into the edge of a chunk. Returns whether it is whole then; sets `failed` without memory. */
static int fill(Edge *edge, uint32_t from, uint32_t to, uint32_t size, const uint8_t *data) {
    memcpy(edge->bytes + from, data, to - from);
    for (uint32_t at = from; at < to;) {
        uint32_t stop = (at / 64 + 1) * 64 < to ? (at / 64 + 1) * 64 : to, width = stop - at;
        edge->have[at / 64] |= (width == 64 ? ~0ULL : ((1ULL << width) - 1)) << at % 64;
        at = stop;
    }
    for (uint32_t at = 0; at < size; at += 64) {
        uint32_t width = size - at < 64 ? size - at : 64;
        if (edge->have[at / 64] != (width == 64 ? ~0ULL : (1ULL << width) - 1)) return 0;
    }
    return 1;
}

/* Take bytes of a chunk that is not hashed. Returns its edge if it is whole then, which is no more in its page. */
static Edge *take_edge(Leaf *leaf, uint32_t chunk, uint32_t from, uint32_t to, uint32_t size, const uint8_t *data,
                       int *failed) {
    Page *page = page_of(leaf, chunk);
    Edge **edge = page ? &page->edges[chunk % PAGE] : NULL;
    if (edge && !*edge && (*edge = kept(malloc(sizeof **edge), sizeof **edge))) memset((*edge)->have, 0, sizeof (*edge)->have);
    if (!edge || !*edge) {
        *failed = 1;
        return NULL;
    }
    if (!fill(*edge, from, to, size, data)) return NULL;
    Edge *whole = *edge;
    *edge = NULL;
    return whole;
}

/* The value of a chunk whose edge is whole, from the edge. */
static void hash_edge(Leaf *leaf, uint32_t chunk, Edge *edge, uint32_t size) {
    hash_chunk(edge->bytes, size, chunk, leaf->count == 1 ? ROOT : 0, leaf->pages[chunk / PAGE]->values[chunk % PAGE]);
    mark(leaf, chunk, chunk + 1);
    freed(edge, sizeof *edge);
}

/* Edges that are whole, and wait to be hashed side by side without the lock, while the call uses their pages. */
typedef struct {
    Edge *edge;
    Page *page;
    uint32_t chunk;
} WholeEdge;

typedef struct {
    size_t count, room;
    WholeEdge *rows;
} WholeEdges;

/* Let an edge wait. Returns whether there was memory for it. */
static int wait_for(WholeEdges *waiting, Edge *edge, Page *page, uint32_t chunk) {
    if (waiting->count == waiting->room) {
        size_t room = waiting->room ? 2 * waiting->room : 64;
        WholeEdge *rows = realloc(waiting->rows, room * sizeof *rows);
        if (!rows) return 0;
        waiting->rows = rows, waiting->room = room;
    }
    waiting->rows[waiting->count++] = (WholeEdge){edge, page, chunk};
    return 1;
}

/* The values of edges of whole chunks, in leaves of more than one. */
static void hash_edges(const WholeEdges *waiting) {
    Queue chunks = {.blocks = CHUNK / BLOCK, .first = CHUNK_START, .last = CHUNK_END};
    for (size_t i = 0; i < waiting->count; i++) {
        const WholeEdge *row = &waiting->rows[i];
        put(&chunks, row->edge->bytes, row->chunk, row->page->values[row->chunk % PAGE]);
    }
    hash_queue(&chunks);
}

/* The subtree of the chunks [first, first + 2^level), among all subtrees of a leaf. */
static uint32_t number_of(uint32_t first, uint32_t level) { return (1u << (LEVELS - level)) + (first >> level); }

static const uint8_t *joined_at(const Leaf *leaf, uint32_t first, uint32_t level) {
    const uint16_t *places = level < LOW ? leaf->low_places : leaf->places;
    uint32_t place = places ? places[number_of(first, level)] : 0;
    return place ? leaf->joined + (size_t)(place - 1) * VALUE : NULL;
}

/* Keep the value of a subtree that is not there. */
static void keep(Leaf *leaf, uint32_t first, uint32_t level, const uint8_t *value, int *failed) {
    uint16_t **places = level < LOW ? &leaf->low_places : &leaf->places;
    size_t bytes = level < LOW ? LOW_BYTES : HIGH_BYTES;
    if (!*places) *places = kept(calloc(1, bytes), (int64_t)bytes);
    if (*places && leaf->subtrees == leaf->room) {
        uint32_t room = leaf->room ? 2 * leaf->room : 8;
        uint8_t *moved = realloc(leaf->joined, (size_t)room * VALUE);
        if (moved) {
            kept(moved, (int64_t)(room - leaf->room) * VALUE);
            leaf->joined = moved, leaf->room = room;
        }
    }
    if (!*places || leaf->subtrees == leaf->room) {
        *failed = 1;
        return;
    }
    memcpy(leaf->joined + (size_t)leaf->subtrees * VALUE, value, VALUE);
    (*places)[number_of(first, level)] = (uint16_t)++leaf->subtrees;
}

/* The value of a subtree all of whose chunks are hashed; of its chunks beyond `count` there are none. */
static void value_of(const Leaf *leaf, uint32_t count, uint32_t first, uint32_t level, uint32_t flags, uint8_t *out) {
    const uint8_t *known = joined_at(leaf, first, level);
    if (!known && !level) known = leaf->pages[first / PAGE]->values[first % PAGE];
    if (known) {
        memcpy(out, known, VALUE);
        return;
    }
    uint32_t half = first + (1u << (level - 1));
    if (half >= count) {
        value_of(leaf, count, first, level - 1, flags, out);
        return;
    }
    uint8_t pair[BLOCK];
    value_of(leaf, count, first, level - 1, 0, pair);
    value_of(leaf, count, half, level - 1, 0, pair + VALUE);
    uint32_t value[8];
    memcpy(value, IV, 32);
    compress(value, pair, BLOCK, 0, PARENT | flags);
    for (int i = 0; i < 8; i++) put_word(out + 4 * i, value[i]);
}

/* Whether all chunks of a page are hashed, nobody writes them, and their values are not needed by themselves. */
static int is_whole(const Page *page) {
    const Leaf *leaf = page->leaf;
    uint32_t first = page->number * PAGE;
    return !page->users && !leaf->foreign && first + PAGE <= leaf->count && leaf->count > PAGE &&
           are_marked(leaf, first, PAGE);
}

/* Of some pages, join the whole ones side by side, and keep one value of each. */
static void join_pages(Page **pages, size_t count, int *failed) {
    size_t whole = 0;
    for (size_t i = 0; i < count; i++)
        if (pages[i] && is_whole(pages[i])) pages[i]->users = -1, pages[whole++] = pages[i];
    for (uint32_t width = PAGE / 2; width; width /= 2) {
        Queue parents = {.blocks = 1, .flags = PARENT};
        for (size_t i = 0; i < whole; i++)
            for (uint32_t k = 0; k < width; k++) put(&parents, pages[i]->values[2 * k], 0, pages[i]->values[k]);
        hash_queue(&parents);
    }
    for (size_t i = 0; i < whole; i++) {
        Leaf *leaf = pages[i]->leaf;
        keep(leaf, pages[i]->number * PAGE, LOW, pages[i]->values[0], failed);
        if (*failed) leaf->left++; /* it is never completed */
        drop_page(leaf, pages[i]->number);
    }
}

/* The hash of a leaf all of whose chunks are hashed. */
static void finish(const Leaf *leaf, uint32_t count, uint8_t *out) {
    uint32_t pages = (count + PAGE - 1) / PAGE;
    if (leaf->foreign || pages < 2) {
        value_of(leaf, count, 0, LEVELS, ROOT, out);
        return;
    }
    uint8_t values[PAGES][VALUE];
    for (uint32_t i = 0; i < pages; i++) value_of(leaf, count, i * PAGE, LOW, 0, values[i]);
    join(values[0], pages, out);
}

static uint64_t first_chunk(uint64_t start) { return (start + CHUNK - 1) / CHUNK * CHUNK; }

static uint64_t next_page(uint64_t at) { return (at / (PAGE * CHUNK) + 1) * (PAGE * CHUNK); }

/* Take `count` runs of `length` bytes: run i is at data + i * data_step, and in the tensor at offset + i * step.
 *
 * Bytes may come in any order and again. Hashes of the leaves that this call completes go to `hashes`, 32 bytes each,
 * and their numbers to `numbers`; both have room for every leaf that the runs touch. Returns how many they are, -1 if
 * there is no memory (then the leaves that were touched are never completed), -2 if a run is outside of the tensor. */
EXPORT int64_t wherry_leaves_add(Leaves *all, const uint8_t *data, int64_t data_step, uint64_t count, uint64_t length,
                                 uint64_t offset, uint64_t step, uint64_t *numbers, uint8_t *hashes) {
    if (!count || !length) return 0;
    if (length > all->nbytes || offset > all->nbytes - length) return -2;
    if (count > 1 && (step > all->nbytes || (count - 1) > (all->nbytes - length - offset) / (step ? step : 1))) return -2;
    int failed = 0;
    size_t low = (size_t)(offset / LEAF), high = (size_t)((offset + (count - 1) * step + length - 1) / LEAF);

    /* Leaves and pages that the runs touch begin, and stay until this call is over. */
    size_t wide = high - low + 1, turn = 0;
    uint8_t *held = calloc(wide, 1); /* whether this call uses each of them */
    Page **pages = calloc(count, (length / (PAGE * CHUNK) + 4) * sizeof *pages); /* of each run; NULL if all is there */
    if (!held || !pages) {
        free(held), free(pages);
        return -1;
    }
    pthread_mutex_lock(&all->lock);
    for (uint64_t run = 0; run < count && !failed; run++) {
        uint64_t start = offset + run * step;
        for (size_t leaf = (size_t)(start / LEAF); leaf <= (size_t)((start + length - 1) / LEAF); leaf++) {
            if (held[leaf - low] || all->over[leaf]) continue;
            if (!all->leaves[leaf] && !(all->leaves[leaf] = begin(all, leaf))) {
                failed = 1;
                break;
            }
            held[leaf - low] = 1, all->leaves[leaf]->users++;
        }
        for (uint64_t at = first_chunk(start); at + CHUNK <= start + length && !failed; at = next_page(at)) {
            size_t leaf = (size_t)(at / LEAF);
            uint32_t chunk = (uint32_t)(at % LEAF / CHUNK);
            Page *page = NULL;
            if (held[leaf - low] && !are_marked(all->leaves[leaf], chunk / PAGE * PAGE, PAGE)) {
                page = page_of(all->leaves[leaf], chunk);
                failed = !page;
                if (page) page->users++;
            }
            pages[turn++] = page;
        }
    }
    size_t turns = turn;
    pthread_mutex_unlock(&all->lock);

    /* Whole chunks, without the lock: each has a place of its own for its value. */
    Queue chunks = {.blocks = CHUNK / BLOCK, .first = CHUNK_START, .last = CHUNK_END};
    turn = 0;
    for (uint64_t run = 0; run < count && !failed; run++) {
        uint64_t start = offset + run * step;
        const uint8_t *bytes = data + (int64_t)run * data_step;
        for (uint64_t at = first_chunk(start), next; at + CHUNK <= start + length; at = next) {
            Page *page = pages[turn++];
            next = next_page(at);
            for (; page && at < next && at + CHUNK <= start + length; at += CHUNK) {
                uint32_t chunk = (uint32_t)(at % LEAF / CHUNK);
                if (bytes_of(all, (size_t)(at / LEAF)) == CHUNK)
                    hash_chunk(bytes + (at - start), CHUNK, 0, ROOT, page->values[0]);
                else
                    put(&chunks, bytes + (at - start), chunk, page->values[chunk % PAGE]);
            }
        }
    }
    hash_queue(&chunks);

    /* Count them, and collect the edges. */
    int64_t complete = 0;
    pthread_mutex_lock(&all->lock);
    WholeEdges waiting = {0};
    for (uint64_t run = 0; run < count && !failed; run++) {
        uint64_t start = offset + run * step, stop = start + length;
        const uint8_t *bytes = data + (int64_t)run * data_step;
        for (uint64_t at = start; at < stop && !failed;) {
            size_t number = (size_t)(at / LEAF);
            uint64_t leaf_end = (uint64_t)(number + 1) * LEAF < stop ? (uint64_t)(number + 1) * LEAF : stop;
            Leaf *leaf = held[number - low] ? all->leaves[number] : NULL;
            uint32_t chunk = (uint32_t)(at % LEAF / CHUNK);
            uint64_t end = at - at % CHUNK + CHUNK;
            if (at % CHUNK == 0 && end <= leaf_end) {
                end = leaf_end - leaf_end % CHUNK;
                if (leaf) mark(leaf, chunk, chunk + (uint32_t)((end - at) / CHUNK));
            } else {
                if (end > leaf_end) end = leaf_end;
                if (leaf && !is_marked(leaf, chunk)) {
                    uint64_t first = at - at % CHUNK, left = all->nbytes - first;
                    uint32_t size = left < CHUNK ? (uint32_t)left : CHUNK;
                    Edge *edge = take_edge(leaf, chunk, (uint32_t)(at - first), (uint32_t)(end - first), size,
                                           bytes + (at - start), &failed);
                    Page *page = leaf->pages[chunk / PAGE];
                    if (page) page->users++;
                    pages[turns++] = page;
                    if (edge && (size < CHUNK || leaf->count == 1)) {
                        hash_edge(leaf, chunk, edge, size);
                    } else if (edge && !wait_for(&waiting, edge, page, chunk)) {
                        failed = 1;
                        freed(edge, sizeof *edge);
                    }
                }
            }
            at = end;
        }
    }
    if (waiting.count) { /* their leaves and pages stay, as this call uses them */
        pthread_mutex_unlock(&all->lock);
        if (!failed) hash_edges(&waiting);
        pthread_mutex_lock(&all->lock);
        for (size_t i = 0; i < waiting.count; i++) {
            WholeEdge *row = &waiting.rows[i];
            if (!failed) mark(row->page->leaf, row->chunk, row->chunk + 1);
            freed(row->edge, sizeof *row->edge);
        }
        free(waiting.rows);
    }
    for (turn = 0; turn < turns; turn++)
        if (pages[turn]) pages[turn]->users--;
    for (size_t i = 0; i < wide; i++)
        if (held[i]) all->leaves[low + i]->users--;
    if (!failed) join_pages(pages, turns, &failed);
    for (size_t i = 0; i < wide; i++) {
        if (!held[i]) continue;
        Leaf *leaf = all->leaves[low + i];
        if (!failed && !leaf->left && !leaf->users && !all->over[low + i]) {
            all->over[low + i] = 1;
            numbers[complete++] = low + i;
        }
    }
    pthread_mutex_unlock(&all->lock);

    /* Join what is complete: nobody else uses it any more. */
    for (int64_t i = 0; i < complete; i++) {
        size_t number = (size_t)numbers[i];
        finish(all->leaves[number], chunks_of(all, number), hashes + i * VALUE);
        drop(all->leaves[number]);
        all->leaves[number] = NULL;
    }
    free(held), free(pages);
    return failed ? -1 : complete;
}

/* What has come of a leaf, for another process: entries in the order of their chunks.
 *
 * - chunk (2 bytes, low byte first), level (1), value (32): all bytes of the chunks [chunk, chunk + 2^level) have come,
 *   and no larger subtree of which that is true has them.
 * - chunk (2), EDGE (1), start (2), stop (2), bytes: of the chunk, these bytes have come, but not the bytes next to
 *   them, so not all of it.
 *
 * So the same bytes give the same entries, in whatever pieces they came. */
enum { HEAD = 3, BOUNDS = 4, EDGE = 255 };

typedef struct {
    uint8_t *at;
    uint64_t room;
    int full; /* whether something had no room */
} Entries;

static void put_entry(Entries *to, uint32_t chunk, uint32_t kind, const uint8_t *bounds, const uint8_t *data, uint64_t size) {
    uint64_t before = HEAD + (bounds ? BOUNDS : 0);
    if (to->full || to->room < before + size) {
        to->full = 1;
        return;
    }
    to->at[0] = (uint8_t)chunk, to->at[1] = (uint8_t)(chunk >> 8), to->at[2] = (uint8_t)kind;
    if (bounds) memcpy(to->at + HEAD, bounds, BOUNDS);
    memcpy(to->at + before, data, size);
    to->at += before + size, to->room -= before + size;
}

static void put_edges(const Edge *edge, uint32_t chunk, Entries *to) {
    for (uint32_t from = 0; from < CHUNK;) {
        if (!(edge->have[from / 64] >> from % 64 & 1)) {
            from++;
            continue;
        }
        uint32_t stop = from;
        while (stop < CHUNK && edge->have[stop / 64] >> stop % 64 & 1) stop++;
        uint8_t bounds[BOUNDS] = {(uint8_t)from, (uint8_t)(from >> 8), (uint8_t)stop, (uint8_t)(stop >> 8)};
        put_entry(to, chunk, EDGE, bounds, edge->bytes + from, stop - from);
        from = stop;
    }
}

static void put_subtree(const Leaf *leaf, uint32_t count, uint32_t first, uint32_t level, Entries *to) {
    uint32_t width = 1u << level;
    if (first >= count) return;
    if (first + width <= count && width < count && are_marked(leaf, first, width)) {
        uint8_t value[VALUE];
        value_of(leaf, count, first, level, 0, value);
        put_entry(to, first, level, NULL, value, VALUE);
    } else if (level) {
        put_subtree(leaf, count, first, level - 1, to);
        put_subtree(leaf, count, first + width / 2, level - 1, to);
    } else if (leaf->pages[first / PAGE] && leaf->pages[first / PAGE]->edges[first % PAGE]) {
        put_edges(leaf->pages[first / PAGE]->edges[first % PAGE], first, to);
    }
}

/* Write what has come of a leaf that is not over. Returns how many bytes that is; -1 if there is no room for it, -2 if
 * there is no such leaf. */
EXPORT int64_t wherry_leaves_export(Leaves *all, size_t number, uint8_t *out, uint64_t room) {
    if (number >= all->count) return -2;
    Entries to = {.at = out, .room = room};
    pthread_mutex_lock(&all->lock);
    if (all->leaves[number] && !all->over[number])
        put_subtree(all->leaves[number], chunks_of(all, number), 0, LEVELS, &to);
    pthread_mutex_unlock(&all->lock);
    return to.full ? -1 : to.at - out;
}

static uint32_t pair_at(const uint8_t *bytes) { return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8; }

static uint32_t size_of(const Leaves *all, size_t number, uint32_t chunk) {
    uint64_t left = bytes_of(all, number) - (uint64_t)chunk * CHUNK;
    return left < CHUNK ? (uint32_t)left : CHUNK;
}

/* Whether bytes are what wherry_leaves_export can write of a leaf. */
static int are_entries(const Leaves *all, size_t number, const uint8_t *data, uint64_t size) {
    uint32_t count = chunks_of(all, number), next = 0; /* first chunk that may come */
    uint32_t edge = CHUNKS, end = 0;                    /* chunk of the last edge, and where that ends */
    for (uint64_t at = 0; at < size;) {
        if (size - at < HEAD) return 0;
        uint32_t first = pair_at(data + at), kind = data[at + 2];
        at += HEAD;
        if (first >= count) return 0;
        if (kind == EDGE) {
            if (size - at < BOUNDS) return 0;
            uint32_t from = pair_at(data + at), stop = pair_at(data + at + 2), whole = size_of(all, number, first);
            at += BOUNDS;
            if (from >= stop || stop > whole || stop - from == whole || size - at < stop - from) return 0;
            if (first == edge ? from <= end : first < next) return 0;
            at += stop - from, edge = first, end = stop, next = first + 1;
        } else {
            if (kind >= LEVELS || size - at < VALUE) return 0;
            uint32_t width = 1u << kind;
            if (first < next || first % width || first + width > count || width >= count) return 0;
            at += VALUE, next = first + width;
        }
    }
    return 1;
}

/* Keep the value of a subtree, unless all of its chunks are hashed. */
static void take_subtree(Leaf *leaf, uint32_t first, uint32_t level, const uint8_t *value, int *failed) {
    if (are_marked(leaf, first, 1u << level)) return;
    leaf->foreign = 1;
    keep(leaf, first, level, value, failed);
    if (!*failed) mark(leaf, first, first + (1u << level));
}

/* Take what another process has exported of a leaf. Returns 1 if the leaf is complete now, and writes its hash; else 0;
 * -1 if there is no memory (then the leaf is never completed), -2 if the bytes are no export of this leaf. */
EXPORT int wherry_leaves_import(Leaves *all, size_t number, const uint8_t *data, uint64_t size, uint8_t *hash) {
    if (number >= all->count || !are_entries(all, number, data, size)) return -2;
    uint32_t count = chunks_of(all, number);
    int failed = 0, complete = 0;
    pthread_mutex_lock(&all->lock);
    Leaf *leaf = all->leaves[number];
    if (!all->over[number] && !leaf) {
        leaf = all->leaves[number] = begin(all, number);
        failed = !leaf;
    }
    for (uint64_t at = 0; at < size && !failed && !all->over[number];) {
        uint32_t first = pair_at(data + at), kind = data[at + 2];
        at += HEAD;
        if (kind == EDGE) {
            uint32_t from = pair_at(data + at), stop = pair_at(data + at + 2);
            at += BOUNDS;
            if (!is_marked(leaf, first)) {
                uint32_t width = size_of(all, number, first);
                Edge *edge = take_edge(leaf, first, from, stop, width, data + at, &failed);
                if (edge) hash_edge(leaf, first, edge, width);
            }
            at += stop - from;
        } else {
            take_subtree(leaf, first, kind, data + at, &failed);
            at += VALUE;
        }
    }
    if (leaf && failed) leaf->left++; /* a chunk that never comes */
    if (leaf && !all->over[number] && !leaf->left && !leaf->users) all->over[number] = 1, complete = 1;
    pthread_mutex_unlock(&all->lock);
    if (complete) { /* nobody else uses it any more */
        finish(leaf, count, hash);
        drop(leaf);
        all->leaves[number] = NULL;
    }
    return failed ? -1 : complete;
}
