/* The compiled core: from a row of logits to what is known of it, and to the next token.
 *
 * NumPy and llama.cpp's samplers are the truth, and this file never disagrees with them about a token:
 * where rounding could decide (two tokens nearly tied in the race, a cut between equal logits, a sum
 * within rounding of top-p), or where a row holds NaN, it returns LB_UNDECIDED, and the caller asks them.
 *
 * Plain C11 and libm. It is compiled without contraction and without -ffast-math, and sums run in a fixed
 * number of lanes, so results do not depend on which instructions the compiler picks.
 */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define LB_API __declspec(dllexport)
#elif defined(__GNUC__)
#define LB_API __attribute__((visibility("default")))
#else
#define LB_API
#endif

/* The build defines LB_CLONES where compiler and linker choose among variants of a function at run time. */
#if defined(LB_CLONES)
#define LB_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define LB_SIMD
#endif

#if defined(__GNUC__)
#define LB_INLINE static inline __attribute__((always_inline))
#elif defined(_MSC_VER)
#define LB_INLINE static __forceinline
#else
#define LB_INLINE static inline
#endif

enum { LB_OK = 0, LB_UNDECIDED = 1 };
enum { LANES = 16 };

/* GCC unrolls so short a loop before it looks for vectors, and then finds none. */
#if defined(__GNUC__) && !defined(__clang__)
#define EACH_LANE(l) _Pragma("GCC unroll 1") for (int l = 0; l < LANES; l++)
#else
#define EACH_LANE(l) for (int l = 0; l < LANES; l++)
#endif

/* A row before any sampling setting; nats. */
typedef struct {
    double logsumexp;
    double entropy;
    float top;    /* the largest logit */
    int32_t best; /* its token, the smallest id among equals; -1: NaN, or no finite maximum */
} lb_row;

/* Settings, and memory for the work: for one call at a time. */
typedef struct {
    int32_t n_vocab;
    int32_t greedy;
    int32_t top_k;     /* below n_vocab; 0: all */
    float top_p;       /* 1: off */
    float min_p;       /* 0: off */
    float temperature; /* 1: off */
    int32_t n_bias;
    const int32_t *bias_ids;
    const float *bias;
    const uint32_t *mask; /* (n_vocab) bits, 1 = the token is allowed; NULL: all are */
    float *biased;    /* (n_vocab): the row with its mask and its bias; unused without them */
    float *maxima;    /* (n_vocab): of blocks, then a copy to select from */
    uint64_t *keys;   /* (2 n_vocab): candidates to sort */
    int32_t *ids;     /* (n_vocab): the candidates */
    float *logits;    /* (n_vocab): theirs, divided by the temperature; before, space to select in */
    double *weights;  /* (n_vocab): their log-weights, the largest 0 */
} lb_sampler;

/* What a call on a row returns. */
typedef struct {
    lb_row row;
    double logprob;  /* of the token under the row, nats */
    int32_t token;   /* -1: undecided */
    int32_t n;       /* candidates found; 0: undecided */
} lb_choice;

/* -- measuring ------------------------------------------------------------------------------------- */

/* exp(x) of LANES numbers in [-87, 0], to 1e-7 relative: 2^n times a polynomial in the rest. */
LB_INLINE void exp_lanes(const float *x, float *out) {
    EACH_LANE(l) {
        const float shift = 12582912.0f; /* 1.5 2^23: adding it rounds to the nearest integer */
        float n = x[l] * 1.44269504f + shift;
        n -= shift;
        float r = (x[l] - n * 0.693359375f) + n * 2.12194440e-4f;
        float p = 1.9875691e-4f;
        p = p * r + 1.3981999e-3f;
        p = p * r + 8.3334519e-3f;
        p = p * r + 4.1665796e-2f;
        p = p * r + 1.6666666e-1f;
        p = p * r + 5.0000001e-1f;
        p = p * r * r + r + 1.0f;
        int32_t bits = ((int32_t)n + 127) * (1 << 23);
        float scale;
        memcpy(&scale, &bits, sizeof scale);
        out[l] = p * scale;
    }
}

/* Write the maximum of each block of ``size`` logits; return the row's maximum, and NaN if the row holds
 * NaN. The last block may be shorter. */
LB_SIMD static float block_maxima(const float *x, int32_t n, int32_t size, float *maxima) {
    float most = -INFINITY;
    int32_t any_nan = 0;
    for (int32_t start = 0, b = 0; start < n; start += size, b++) {
        int32_t end = n - start < size ? n : start + size;
        float top[LANES];
        int32_t nan[LANES];
        EACH_LANE(l) {
            top[l] = -INFINITY;
            nan[l] = 0;
        }
        int32_t i = start;
        for (; i + LANES <= end; i += LANES) {
            EACH_LANE(l) {
                float v = x[i + l];
                top[l] = v > top[l] ? v : top[l];
                nan[l] |= v != v;
            }
        }
        for (; i < end; i++) {
            top[0] = x[i] > top[0] ? x[i] : top[0];
            nan[0] |= x[i] != x[i];
        }
        float m = top[0];
        EACH_LANE(l) {
            m = top[l] > m ? top[l] : m;
            any_nan |= nan[l];
        }
        maxima[b] = m;
        most = m > most ? m : most;
    }
    return any_nan ? NAN : most;
}

LB_SIMD static int32_t first_equal(const float *x, int32_t n, float value) {
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        int32_t found = 0;
        EACH_LANE(l) { found |= x[i + l] == value; }
        if (found) break;
    }
    while (i < n && x[i] != value) i++;
    return i < n ? i : -1;
}

/* Sum exp(x - top), and the same times (x - top): the log-sum-exp and the entropy follow. */
LB_SIMD static void exp_sums(const float *x, int32_t n, float top, double *total, double *mean) {
    double sums[LANES], means[LANES];
    EACH_LANE(l) { sums[l] = means[l] = 0.0; }
    for (int32_t i = 0; i < n; i += LANES) {
        float shifted[LANES], w[LANES];
        int32_t m = n - i < LANES ? n - i : LANES;
        if (m == LANES) {
            EACH_LANE(l) {
                float d = x[i + l] - top;
                shifted[l] = d > -87.0f ? d : -87.0f; /* -inf too: its weight is 1e-38 */
            }
        } else {
            EACH_LANE(l) {
                float d = l < m ? x[i + l] - top : -87.0f;
                shifted[l] = d > -87.0f ? d : -87.0f;
            }
        }
        exp_lanes(shifted, w);
        EACH_LANE(l) {
            sums[l] += (double)w[l];
            means[l] += (double)(w[l] * shifted[l]);
        }
    }
    double s = 0.0, t = 0.0;
    EACH_LANE(l) {
        s += sums[l];
        t += means[l];
    }
    *total = s;
    *mean = t;
}

/* Fill in the rest of a row whose maximum ``top`` is known. */
static void measure_from(const float *x, int32_t n, float top, lb_row *out) {
    double total, mean;
    exp_sums(x, n, top, &total, &mean);
    double log_total = log(total), entropy = log_total - mean / total;
    out->logsumexp = (double)top + log_total;
    out->entropy = entropy > 0.0 ? entropy : 0.0;
}

static int find_top(const float *x, int32_t n, float top, lb_row *out) {
    out->logsumexp = out->entropy = NAN;
    out->top = top;
    out->best = isfinite(top) ? first_equal(x, n, top) : -1;
    return out->best < 0 ? LB_UNDECIDED : LB_OK;
}

/* -- candidates: the same as llama.cpp's samplers keep, in the same order ------------------------------- */

/* A key whose order is that of (logit, smaller id): for finite logits and -inf. */
LB_INLINE uint64_t key_of(float logit, int32_t id) {
    uint32_t bits;
    logit += 0.0f; /* -0 becomes 0: they are equal */
    memcpy(&bits, &logit, sizeof bits);
    bits ^= (bits >> 31) ? 0xFFFFFFFFu : 0x80000000u;
    return (uint64_t)bits << 32 | (uint32_t)~id;
}

LB_INLINE int32_t id_of(uint64_t key) { return (int32_t)~(uint32_t)key; }

/* Sort descending: insertion in runs of 16, then merges; ``spare`` has room for n keys. */
static void sort_keys(uint64_t *keys, uint64_t *spare, int32_t n) {
    enum { RUN = 16 };
    for (int32_t start = 0; start < n; start += RUN) {
        int32_t end = n - start < RUN ? n : start + RUN;
        for (int32_t i = start + 1; i < end; i++) {
            uint64_t key = keys[i];
            int32_t j = i;
            for (; j > start && keys[j - 1] < key; j--) keys[j] = keys[j - 1];
            keys[j] = key;
        }
    }
    uint64_t *from = keys, *to = spare;
    for (int64_t run = RUN; run < n; run *= 2) {
        for (int64_t start = 0; start < n; start += 2 * run) {
            int64_t mid = start + run < n ? start + run : n;
            int64_t end = start + 2 * run < n ? start + 2 * run : n;
            int64_t a = start, b = mid;
            for (int64_t at = start; at < end; at++) {
                to[at] = b >= end || (a < mid && from[a] > from[b]) ? from[a++] : from[b++];
            }
        }
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != keys) memcpy(keys, from, (size_t)n * sizeof *keys);
}

/* The k-th largest of n numbers without NaN (1 <= k <= n); reorders them (Hoare's selection). */
static float kth_largest(float *x, int32_t n, int32_t k) {
    int32_t low = 0, high = n - 1, at = k - 1;
    while (low < high) {
        float a = x[low], b = x[low + (high - low) / 2], c = x[high];
        float pivot = a > b ? (b > c ? b : (a > c ? c : a)) : (a > c ? a : (b > c ? c : b));
        int32_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i <= j) {
                float swap = x[i];
                x[i++] = x[j];
                x[j--] = swap;
            }
        }
        if (at <= j) high = j;
        else if (at >= i) low = i;
        else break;
    }
    return x[at];
}

/* The block size at which at least 3 k blocks exist, if the row is long enough. */
static int32_t block_size(int32_t n, int32_t k) {
    int32_t size = n / (3 * (k < 1 ? 1 : k)) / LANES * LANES;
    return size < LANES ? LANES : (size > 1024 ? 1024 : size);
}

/* Collect the keys of all logits >= least; ``maxima`` holds those of blocks of ``size``, or is NULL. */
static int32_t collect(
    const float *x, int32_t n, float least, const float *maxima, int32_t size, uint64_t *keys
) {
    int32_t found = 0;
    if (!maxima) size = n;
    for (int32_t start = 0, b = 0; start < n; start += size, b++) {
        if (maxima && !(maxima[b] >= least)) continue;
        int32_t end = n - start < size ? n : start + size;
        for (int32_t i = start; i < end; i++) {
            if (x[i] >= least) keys[found++] = key_of(x[i], i);
        }
    }
    return found;
}

/* Put the keys of the k largest logits first, in descending order; -inf is left out.
 *
 * ``maxima`` holds those of blocks of ``size`` and is overwritten. Returns how many, 0 where the cut is
 * between equal logits: llama.cpp's choice among these is not specified. */
static int32_t largest(lb_sampler *s, const float *x, float *maxima, int32_t size, int32_t k) {
    int32_t n = s->n_vocab, n_blocks = (n + size - 1) / size, found;
    if (k > n) k = n;
    if (n_blocks >= 2 * k) {
        /* k blocks have a maximum of at least the k-th largest maximum, so k logits are that large. The
         * selection reorders its input, so it works on a copy behind the maxima. */
        float *copy = s->logits;
        memcpy(copy, maxima, (size_t)n_blocks * sizeof *copy);
        float least = kth_largest(copy, n_blocks, k);
        if (least == -INFINITY) least = -FLT_MAX;
        found = collect(x, n, least, maxima, size, s->keys);
    } else {
        memcpy(maxima, x, (size_t)n * sizeof *maxima);
        float least = kth_largest(maxima, n, k);
        if (least == -INFINITY) least = -FLT_MAX;
        found = collect(x, n, least, NULL, 0, s->keys);
    }
    sort_keys(s->keys, s->keys + n, found);
    if (found <= k) return found;
    return s->keys[k - 1] >> 32 == s->keys[k] >> 32 ? 0 : k;
}

/* Sum e^(logit - top) in llama.cpp's own order and 32-bit arithmetic. Python has compared the two expf. */
static float softmax_total(const float *x, int32_t n, float top) {
    float total = 0.0f;
    for (int32_t i = 0; i < n; i++) total += expf(x[i] - top);
    return total;
}

/* top-p over the sorted candidates, whose weights sum to ``total``: llama.cpp's arithmetic, step by step.
 * Returns how many it keeps, 0: undecided, -1: the n candidates do not reach p. */
static int32_t cut_top_p(const uint64_t *keys, const float *x, int32_t n, float top, float total, float p) {
    float sum = 0.0f;
    for (int32_t i = 0; i < n; i++) {
        sum += expf(x[id_of(keys[i])] - top) / total;
        if (sum >= p) {
            int is_tie = i + 1 < n && keys[i] >> 32 == keys[i + 1] >> 32;
            return is_tie ? 0 : i + 1;
        }
    }
    return -1;
}

/* The logit below which min-p drops a token; ``*slack``: how far a logf that rounds differently moves it. */
static float min_p_logit(float top, float min_p, float *slack) {
    float log_p = logf(min_p), least = top + log_p;
    *slack = FLT_EPSILON * (fabsf(log_p) + fabsf(least)) + FLT_MIN;
    return least;
}

/* Keep what top-k, top-p and min-p leave, in descending order: ids to s->ids. Returns how many, 0:
 * undecided. */
static int32_t keep_sorted(lb_sampler *s, const float *x, float top, float *maxima, int32_t size) {
    int32_t n = s->n_vocab, kept = 0, cut = -1;
    if (s->top_k > 0) {
        kept = largest(s, x, maxima, size, s->top_k);
        if (kept && s->top_p < 1.0f) {
            float total = 0.0f;
            for (int32_t i = 0; i < kept; i++) total += expf(x[id_of(s->keys[i])] - top);
            cut = cut_top_p(s->keys, x, kept, top, total, s->top_p);
        }
    } else {
        float total = softmax_total(x, n, top);
        /* Mostly a few tokens hold p: try the 256 largest, then all. */
        if (n > 1024) {
            kept = largest(s, x, maxima, size, 256);
            if (kept) cut = cut_top_p(s->keys, x, kept, top, total, s->top_p);
        }
        if (cut < 0) {
            kept = collect(x, n, -FLT_MAX, NULL, 0, s->keys);
            sort_keys(s->keys, s->keys + n, kept);
            cut = cut_top_p(s->keys, x, kept, top, total, s->top_p);
        }
    }
    if (cut >= 0) kept = cut;
    if (kept && s->min_p > 0.0f) {
        float slack, least = min_p_logit(top, s->min_p, &slack);
        int32_t i = 1; /* the first one always stays */
        for (; i < kept; i++) {
            float logit = x[id_of(s->keys[i])], gap = logit - least;
            if (logit == top) continue;
            if (gap > -slack && gap < slack) return 0;
            if (gap < 0.0f) break;
        }
        kept = i;
    }
    for (int32_t i = 0; i < kept; i++) s->ids[i] = id_of(s->keys[i]);
    return kept;
}

/* Keep what min-p alone leaves, in the order of ids; else as ``keep_sorted``. */
static int32_t keep_min_p(lb_sampler *s, const float *x, float top, const float *maxima, int32_t size) {
    int32_t n = s->n_vocab, kept = 0;
    float slack, least = min_p_logit(top, s->min_p, &slack);
    if (!(least >= -FLT_MAX)) return 0;
    for (int32_t start = 0, b = 0; start < n; start += size, b++) {
        if (maxima[b] < least - slack) continue;
        int32_t end = n - start < size ? n : start + size;
        for (int32_t i = start; i < end; i++) {
            float gap = x[i] - least;
            if (gap > -slack && gap < slack && x[i] != top) return 0;
            if (gap >= 0.0f || x[i] == top) s->ids[kept++] = i;
        }
    }
    return kept;
}

/* Keep all but masked tokens, in the order of ids. */
static int32_t keep_all(lb_sampler *s, const float *x) {
    int32_t n = s->n_vocab, kept = 0;
    for (int32_t i = 0; i < n; i++) {
        s->ids[kept] = i;
        kept += x[i] >= -FLT_MAX;
    }
    return kept;
}

/* Divide the candidates' logits by the temperature; return 0 if one overflows. */
LB_SIMD static int scale(const float *x, const int32_t *ids, int32_t n, float temperature, float *out) {
    int32_t overflows = 0;
    if (temperature == 1.0f) {
        for (int32_t i = 0; i < n; i++) out[i] = x[ids[i]];
    } else {
        for (int32_t i = 0; i < n; i++) out[i] = x[ids[i]] / temperature;
    }
    for (int32_t i = 0; i < n; i++) overflows |= fabsf(out[i]) > FLT_MAX;
    return !overflows;
}

/* Find the candidates that are left of ``x`` (with its bias): ids and logits after the temperature.
 * ``top`` is the largest logit, ``maxima`` those of blocks. Returns how many, 0: undecided. */
static int32_t find_candidates(lb_sampler *s, const float *x, float top, float *maxima, int32_t size) {
    int32_t n;
    if (s->top_k > 0 || s->top_p < 1.0f) n = keep_sorted(s, x, top, maxima, size);
    else if (s->min_p > 0.0f) n = keep_min_p(s, x, top, maxima, size);
    else n = keep_all(s, x);
    return n && scale(x, s->ids, n, s->temperature, s->logits) ? n : 0;
}

/* -- drawing --------------------------------------------------------------------------------------- */

/* The counter-based noise of sampling/noise.py. */
static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;
static const uint64_t MIX_1 = 0xFF51AFD7ED558CCDu, MIX_2 = 0xC4CEB9FE1A85EC53u;

LB_INLINE uint64_t mix(uint64_t x) {
    x ^= x >> 33;
    x *= MIX_1;
    x ^= x >> 33;
    x *= MIX_2;
    return x ^ (x >> 33);
}

static uint64_t noise_key(uint64_t seed, uint64_t position, uint64_t purpose) {
    uint64_t key = mix(seed + GOLDEN);
    key = mix(key ^ (position + 1) * GOLDEN);
    return mix(key ^ (purpose + 1) * MIX_2);
}

LB_INLINE uint64_t noise_bits(uint64_t key, int32_t id) {
    return mix(((uint64_t)id + 1) * GOLDEN ^ key);
}

/* The race -log(u) / w, in which the least number wins; the same as the largest log(u) / w. */
typedef struct {
    double least;
    int32_t winner; /* the candidate's number */
    int is_close;   /* another one is so near that rounding could decide */
} race;

/* Enter a candidate whose logit is ``x`` below the largest. */
LB_INLINE void enter(race *r, uint64_t key, int32_t id, double x, int32_t number) {
    const double close = 1e-11;
    double u = ((double)(noise_bits(key, id) >> 11) + 0.5) * 0x1p-53;
    double w = exp(x);
    w = w > 1e-300 ? w : 1e-300;
    if (1.0 - u > r->least * w * (1.0 + 1e-9)) return; /* -log(u) >= 1 - u: it cannot win */
    double time = -log(u) / w;
    if (time < r->least) {
        r->is_close = r->least * (1.0 - close) <= time;
        r->least = time;
        r->winner = number;
    } else if (time * (1.0 - close) <= r->least) {
        r->is_close = 1;
    }
}

/* Return the first of the blocks of LANES candidates from number i on in which one could beat ``least``,
 * by bounds of -log(u) and of w; past the last full block, the number after it. */
LB_SIMD static int32_t next_contest(
    const float *x, const int32_t *ids, int32_t i, int32_t n, uint64_t key, float top, float least
) {
    for (; i + LANES <= n; i += LANES) {
        float below[LANES], w[LANES];
        int32_t any = 0;
        EACH_LANE(l) {
            float d = x[i + l] - top;
            below[l] = d > -87.0f ? d : -87.0f;
        }
        exp_lanes(below, w);
        EACH_LANE(l) {
            /* u <= (b + 1) / 2^24 for the upper 24 bits b, so -log(u) >= 1 - u >= (2^24 - 1 - b) / 2^24. */
            int32_t b = (int32_t)(noise_bits(key, ids[i + l]) >> 40);
            float slowest = (float)(16777215 - b) * 0x1p-24f;
            any |= slowest <= least * w[l] * 1.001f;
        }
        if (any) break;
    }
    return i;
}

/* Draw one of the n candidates; return its number, -1: undecided. */
static int32_t draw(const lb_sampler *s, int32_t n, uint64_t key) {
    if (n == 1) return 0;
    const float *x = s->logits;
    float all, top = block_maxima(x, n, n, &all);
    int32_t best = first_equal(x, n, top);
    race r = {INFINITY, -1, 0};
    enter(&r, key, s->ids[best], 0.0, best);
    for (int32_t i = 0; i < n;) {
        if (n >= 64) {
            float least = r.least < 1e30 ? (float)(r.least * 1.000001) : INFINITY;
            i = next_contest(x, s->ids, i, n, key, top, least);
        }
        for (int32_t end = n - i < LANES ? n : i + LANES; i < end; i++) {
            if (i != best) enter(&r, key, s->ids[i], (double)x[i] - (double)top, i);
        }
    }
    return r.is_close ? -1 : r.winner;
}

/* -- a row as a whole -------------------------------------------------------------------------------- */

/* Copy a row; tokens that the mask does not allow get -inf. */
LB_SIMD static void masked_copy(const float *x, int32_t n, const uint32_t *mask, float *out) {
    for (int32_t start = 0; start < n; start += 32) {
        uint32_t bits = mask[start / 32];
        int32_t m = n - start < 32 ? n - start : 32;
        if (bits == 0) {
            for (int32_t l = 0; l < m; l++) out[start + l] = -INFINITY;
        } else {
            for (int32_t l = 0; l < m; l++) out[start + l] = bits >> l & 1 ? x[start + l] : -INFINITY;
        }
    }
}

/* Find the candidates of a row; measure it too if asked. Returns how many, 0: undecided. */
static int32_t prepare(lb_sampler *s, const float *logits, int measured, lb_row *row) {
    int32_t n = s->n_vocab, size = block_size(n, s->top_k > 0 ? s->top_k : 256);
    if (s->greedy) size = 1024;
    if (find_top(logits, n, block_maxima(logits, n, size, s->maxima), row)) return 0;
    if (measured) measure_from(logits, n, row->top, row);
    const float *x = logits;
    float top = row->top;
    int32_t best = row->best;
    if (s->n_bias > 0 || s->mask) {
        if (s->mask) masked_copy(logits, n, s->mask, s->biased);
        else memcpy(s->biased, logits, (size_t)n * sizeof *logits);
        for (int32_t i = 0; i < s->n_bias; i++) s->biased[s->bias_ids[i]] += s->bias[i];
        x = s->biased;
        top = block_maxima(x, n, size, s->maxima);
        if (!isfinite(top)) return 0;
        best = s->greedy ? first_equal(x, n, top) : -1;
    }
    if (s->greedy) {
        s->ids[0] = best;
        s->logits[0] = top;
        return 1;
    }
    return find_candidates(s, x, top, s->maxima, size);
}

/* Measure a row if asked, find its candidates and draw one of them. */
static int sample_row(
    lb_sampler *s, const float *logits, uint64_t seed, uint64_t position, uint64_t purpose,
    int measured, lb_choice *out
) {
    out->token = -1;
    out->logprob = NAN;
    out->n = prepare(s, logits, measured, &out->row);
    if (out->n == 0) return LB_UNDECIDED;
    int32_t number = draw(s, out->n, noise_key(seed, position, purpose));
    if (number < 0) return LB_UNDECIDED;
    out->token = s->ids[number];
    out->logprob = (double)logits[out->token] - out->row.logsumexp;
    return LB_OK;
}

/* -- decoding ------------------------------------------------------------------------------------------ */

/* llama.cpp's llama_batch; Python has compared the fields. */
typedef struct {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos;
    int32_t *n_seq_id;
    int32_t **seq_id;
    int8_t *logits;
} lb_batch;

/* A llama_context with llama.cpp's own functions. */
typedef struct {
    int32_t (*decode)(void *ctx, lb_batch batch); /* llama_decode */
    float *(*get_logits)(void *ctx);              /* llama_get_logits */
    void *ctx;
    const volatile char *stop; /* not 0: do not begin a decode */
    lb_batch batch;            /* the context's arrays, with room for one token at least */
    const float *logits;       /* of the last decode */
} lb_decoder;

enum { LB_INTERRUPTED = 2 }; /* llama_decode's own code */

/* Decode one token at the end of a sequence and ask for its logits; return llama_decode's code. */
static int decode_one(lb_decoder *d, int32_t token, int32_t position, int32_t seq_id) {
    if (*d->stop) return LB_INTERRUPTED;
    d->batch.n_tokens = 1;
    d->batch.token[0] = token;
    d->batch.pos[0] = position;
    d->batch.seq_id[0][0] = seq_id;
    d->batch.logits[0] = 1;
    int code = d->decode(d->ctx, d->batch);
    d->logits = code == 0 ? d->get_logits(d->ctx) : NULL;
    return code;
}

/* -- what Python calls ------------------------------------------------------------------------------- */

/* The layout of the structures, to compare with Python's; 0 where 32-bit arithmetic is not exact here. */
LB_API int32_t lb_layout(void) {
    if (FLT_EVAL_METHOD != 0) return 0;
    return (int32_t)(
        ((sizeof(lb_row) * 256 + sizeof(lb_sampler)) * 256 + sizeof(lb_choice)) * 256 + sizeof(lb_decoder)
    );
}

/* Which variant of the SIMD code runs: "x86-64-v4", "x86-64-v3" or "portable". */
LB_API const char *lb_variant(void) {
#if defined(LB_CLONES)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) return "x86-64-v4";
    if (__builtin_cpu_supports("x86-64-v3")) return "x86-64-v3";
#endif
    return "portable";
}

/* Write the probabilities of n logits, whose maximum is the first, as llama.cpp computes them. */
LB_API void lb_softmax(const float *logits, int32_t n, float *probs) {
    float total = softmax_total(logits, n, logits[0]);
    for (int32_t i = 0; i < n; i++) probs[i] = expf(logits[i] - logits[0]) / total;
}

/* Write the pieces of all tokens one after the other, and the size of each, 0 for control tokens.
 *
 * ``to_piece`` is llama_token_to_piece. Returns the bytes needed; with too little room nothing more is
 * written. */
LB_API int64_t lb_pieces(
    int32_t (*to_piece)(const void *, int32_t, char *, int32_t, int32_t, int8_t), const void *vocab,
    int32_t n, char *out, int64_t room, int32_t *sizes
) {
    int64_t at = 0;
    for (int32_t token = 0; token < n; token++) {
        int64_t left = room - at;
        int32_t most = left < 0 ? 0 : (left < INT32_MAX ? (int32_t)left : INT32_MAX);
        int32_t size = to_piece(vocab, token, out + (left < 0 ? room : at), most, 0, 0);
        sizes[token] = size < 0 ? -size : size;
        at += sizes[token];
    }
    return at;
}

/* Measure n_rows rows of logits, (n_rows, n_vocab); return LB_UNDECIDED if one has best = -1. */
LB_API int lb_measure(const float *logits, int32_t n_rows, int32_t n_vocab, lb_row *out) {
    int code = LB_OK;
    for (int32_t i = 0; i < n_rows; i++, logits += n_vocab) {
        float all;
        float top = block_maxima(logits, n_vocab, n_vocab, &all);
        code |= find_top(logits, n_vocab, top, out + i);
        if (out[i].best >= 0) measure_from(logits, n_vocab, out[i].top, out + i);
    }
    return code;
}

/* Draw from a row of logits (n_vocab); measure it too if asked. */
LB_API int lb_sample(
    lb_sampler *s, const float *logits, uint64_t seed, uint64_t position, uint64_t purpose,
    int measured, lb_choice *out
) {
    return sample_row(s, logits, seed, position, purpose, measured, out);
}

/* Find the candidates of a row of logits (n_vocab); their log-weights go to s->weights. */
LB_API int lb_candidates(lb_sampler *s, const float *logits, int measured, lb_choice *out) {
    out->token = -1;
    out->logprob = NAN;
    out->n = prepare(s, logits, measured, &out->row);
    if (out->n == 0) return LB_UNDECIDED;
    float all, top = block_maxima(s->logits, out->n, out->n, &all);
    for (int32_t i = 0; i < out->n; i++) s->weights[i] = (double)s->logits[i] - (double)top;
    return LB_OK;
}

/* Decode one token, measure its row if asked and draw the one after it; return llama_decode's code. */
LB_API int lb_step(
    lb_decoder *d, int32_t token, int32_t position, int32_t seq_id, lb_sampler *s, uint64_t seed,
    uint64_t purpose, int measured, lb_choice *out
) {
    int code = decode_one(d, token, position, seq_id);
    if (code == 0) sample_row(s, d->logits, seed, (uint64_t)position + 1, purpose, measured, out);
    return code;
}

/* -- accepting --------------------------------------------------------------------------------------- */

/* The acceptance rules of speculative/rules.py. */
enum { LB_SEEDED = 0, LB_TOKEN = 1, LB_BLOCK = 2 };

/* Probabilities here and in NumPy differ by less, relative to the terms of their sums. */
static const double ROUNDING = 1e-10;

enum { LB_RULE = 1 }; /* the purpose of a rule's coins in sampling/noise.py */

/* A distribution: proportional to exp(weight). */
typedef struct {
    const int32_t *ids;
    const double *weights;
    int32_t n;
    double top;   /* the largest weight */
    double total; /* of exp(weight - top) */
} lb_dist;

/* A draft and what a rule makes of it. */
typedef struct {
    lb_sampler *sampler;
    const float *rows;     /* (n + 1, n_vocab): the target's logits before and after each token */
    const int32_t *tokens; /* (n): drafted */
    const int32_t *const *source_ids;    /* (n): what each token was drawn from; NULL: from nothing else */
    const double *const *source_weights; /* (n): their log-weights */
    const int32_t *source_sizes;         /* (n) */
    lb_row *measures;      /* (n + 1): of the rows before the accepted tokens and the one that follows */
    uint64_t seed;
    uint64_t position;     /* of the first drafted token */
    int32_t n;
    int32_t rule;
    int32_t measured;      /* whether ``measures`` are wanted */
    int32_t n_accepted;
    int32_t token;         /* follows the accepted ones */
} lb_acceptance;

static void sum_weights(lb_dist *d) {
    d->top = -INFINITY;
    d->total = 0.0;
    for (int32_t i = 0; i < d->n; i++) d->top = d->weights[i] > d->top ? d->weights[i] : d->top;
    for (int32_t i = 0; i < d->n; i++) d->total += exp(d->weights[i] - d->top);
}

LB_INLINE double prob_at(const lb_dist *d, int32_t i) { return exp(d->weights[i] - d->top) / d->total; }

static double prob_of(const lb_dist *d, int32_t token) {
    for (int32_t i = 0; i < d->n; i++) {
        if (d->ids[i] == token) return prob_at(d, i);
    }
    return 0.0;
}

/* The target's distribution after i drafted tokens; 0: undecided. */
static int target_at(const lb_acceptance *v, int32_t i, lb_dist *out) {
    lb_sampler *s = v->sampler;
    lb_choice choice;
    if (lb_candidates(s, v->rows + (int64_t)s->n_vocab * i, 0, &choice)) return 0;
    out->ids = s->ids;
    out->weights = s->weights;
    out->n = choice.n;
    sum_weights(out);
    return 1;
}

/* What drafted token i was drawn from; 0: its source cannot yield it. */
static int source_at(const lb_acceptance *v, int32_t i, lb_dist *out) {
    static const double certain = 0.0;
    out->ids = v->source_ids ? v->source_ids[i] : v->tokens + i;
    out->weights = v->source_ids ? v->source_weights[i] : &certain;
    out->n = v->source_ids ? v->source_sizes[i] : 1;
    sum_weights(out);
    return out->n > 0 && isfinite(out->top) && prob_of(out, v->tokens[i]) > 0.0;
}

/* Write q's probabilities of p's candidates, by id, to memory for (n_vocab) of them; return it. */
static const double *spread(lb_sampler *s, const lb_dist *q, const lb_dist *p) {
    double *dense = (double *)s->keys; /* free again once the candidates are found */
    for (int32_t i = 0; i < p->n; i++) dense[p->ids[i]] = 0.0;
    for (int32_t i = 0; i < q->n; i++) {
        int32_t id = q->ids[i];
        if (id >= 0 && id < s->n_vocab) dense[id] = prob_at(q, i);
    }
    return dense;
}

/* Throw a rule's coin; -1: undecided. */
static int coin(const lb_acceptance *v, int32_t index, double probability, double rounding) {
    uint64_t key = noise_key(v->seed, v->position, LB_RULE);
    double u = ((double)(mix(key ^ ((uint64_t)index + 1) * GOLDEN) >> 11) + 0.5) * 0x1p-53;
    if (fabs(u - probability) <= rounding) return -1;
    return u <= probability;
}

/* Draw from norm(max(scale p - q, 0)), the token at an offset; return it, -1: undecided. */
static int32_t draw_residual(
    const lb_acceptance *v, const lb_dist *p, const lb_dist *q, double scale, int32_t offset
) {
    lb_sampler *s = v->sampler;
    uint64_t key = noise_key(v->seed, v->position + (uint64_t)offset, 0);
    const double *others = spread(s, q, p);
    int32_t winner = -1, is_close = 0;
    double slowest = INFINITY; /* a bound of the winner's time in the race */
    for (int is_check = 0; is_check < 2; is_check++) {
        for (int32_t i = 0; i < p->n; i++) {
            double a = scale * prob_at(p, i), b = others[p->ids[i]], slack = ROUNDING * (a + b);
            double u = ((double)(noise_bits(key, p->ids[i]) >> 11) + 0.5) * 0x1p-53;
            if (is_check) {
                is_close |= i != winner && a - b + slack > 0.0 && -log(u) / (a - b + slack) <= slowest;
            } else if (a - b - slack > 0.0) {
                double time = -log(u) / (a - b - slack);
                if (time < slowest) {
                    slowest = time;
                    winner = i;
                }
            }
        }
    }
    return winner < 0 || is_close ? -1 : p->ids[winner];
}

/* Draw what follows n accepted tokens; -1: undecided. */
static int32_t draw_next(const lb_acceptance *v, int32_t n, int measured) {
    lb_sampler *s = v->sampler;
    const float *logits = v->rows + (int64_t)s->n_vocab * n;
    int32_t found = prepare(s, logits, measured, v->measures + n);
    if (!found) return -1;
    int32_t number = draw(s, found, noise_key(v->seed, v->position + (uint64_t)n, 0));
    return number < 0 ? -1 : s->ids[number];
}

static int accept_seeded(lb_acceptance *v) {
    for (int32_t i = 0; i <= v->n; i++) {
        int32_t token = draw_next(v, i, v->measured);
        if (token < 0) return LB_UNDECIDED;
        v->n_accepted = i;
        v->token = token;
        if (i < v->n && token != v->tokens[i]) break;
    }
    return LB_OK;
}

static int accept_by_token(lb_acceptance *v) {
    lb_dist p, q;
    for (int32_t i = 0; i < v->n; i++) {
        if (!source_at(v, i, &q) || !target_at(v, i, &p)) return LB_UNDECIDED;
        double ratio = prob_of(&p, v->tokens[i]) / prob_of(&q, v->tokens[i]);
        int comes_up = ratio >= 1.0 + ROUNDING ? 1 : coin(v, i, ratio, ratio > 0.0 ? ROUNDING : 0.0);
        if (comes_up < 0) return LB_UNDECIDED;
        if (!comes_up) {
            v->n_accepted = i;
            v->token = draw_residual(v, &p, &q, 1.0, i);
            return v->token < 0 ? LB_UNDECIDED : LB_OK;
        }
    }
    v->n_accepted = v->n;
    v->token = draw_next(v, v->n, 0);
    return v->token < 0 ? LB_UNDECIDED : LB_OK;
}

/* The block rule; ``weights`` and ``h`` have room for n + 1 numbers. */
static int accept_block(lb_acceptance *v, double *weights, double *h, double *slack) {
    lb_dist p, q;
    double weight = 1.0;
    int32_t reached = 0; /* the longest length that can be accepted */
    for (int32_t i = 0; i < v->n; i++) {
        if (!source_at(v, i, &q) || !target_at(v, i, &p)) return LB_UNDECIDED;
        weights[i] = weight;
        h[i] = 1.0;
        slack[i] = 0.0;
        if (weight < 1.0) {
            double left = 0.0;
            const double *others = spread(v->sampler, &q, &p);
            for (int32_t j = 0; j < p.n; j++) {
                double excess = weight * prob_at(&p, j) - others[p.ids[j]];
                left += excess > 0.0 ? excess : 0.0;
            }
            double rest = left + (1.0 - weight);
            h[i] = left / rest;
            slack[i] = ROUNDING / rest;
        }
        reached = i;
        double ratio = weight * prob_of(&p, v->tokens[i]) / prob_of(&q, v->tokens[i]);
        int is_one = weight == 1.0 && p.n == 1 && q.n == 1 && p.ids[0] == q.ids[0];
        if (!is_one && fabs(ratio - 1.0) <= ROUNDING) return LB_UNDECIDED;
        weight = is_one || ratio > 1.0 ? 1.0 : ratio;
        if (weight == 0.0) break;
        if (i + 1 == v->n) {
            reached = v->n;
            h[v->n] = weight;
            slack[v->n] = weight < 1.0 ? ROUNDING : 0.0;
        }
    }
    int32_t n = reached;
    for (; n > 0; n--) {
        int comes_up = h[n] == 1.0 && slack[n] == 0.0 ? 1 : coin(v, n, h[n], slack[n]);
        if (comes_up < 0) return LB_UNDECIDED;
        if (comes_up) break;
    }
    v->n_accepted = n;
    if (n == v->n) {
        v->token = draw_next(v, n, 0);
    } else {
        if (!source_at(v, n, &q) || !target_at(v, n, &p)) return LB_UNDECIDED;
        v->token = draw_residual(v, &p, &q, weights[n], n);
    }
    return v->token < 0 ? LB_UNDECIDED : LB_OK;
}

/* The layout of the structure, to compare with Python's. */
LB_API int32_t lb_accept_layout(void) { return (int32_t)sizeof(lb_acceptance); }

/* Apply a rule to a draft. ``work`` has room for 3 (n + 1) numbers. */
LB_API int lb_accept(lb_acceptance *v, double *work) {
    int code;
    if (v->rule == LB_SEEDED) {
        code = accept_seeded(v);
    } else {
        int32_t n = v->n + 1;
        code = v->rule == LB_TOKEN ? accept_by_token(v) : accept_block(v, work, work + n, work + 2 * n);
        if (code == LB_OK && v->measured) {
            int32_t n_vocab = v->sampler->n_vocab;
            code = lb_measure(v->rows, v->n_accepted + 1, n_vocab, v->measures);
        }
    }
    return code;
}

/* -- drafting ---------------------------------------------------------------------------------------- */

/* Whether a stream goes on, or why not. */
enum { LB_GOES_ON = 0, LB_FULL_LENGTH = 1, LB_STOPPED = 2, LB_EOG = 3, LB_TO_PYTHON = 4 };

/* One stream's draft. What ends it: ``limit`` tokens, an EOG token, an entropy above ``most_entropy``,
 * ``most_tokens``, and, where there are ``costs``, that no longer draft would raise the throughput: see ``pays``. */
typedef struct {
    lb_sampler *sampler;
    const float *row;    /* the logits after its last token; NULL before the first decode */
    const float *hidden; /* of a head: the state after its last token, which goes in with the next */
    uint64_t seed;
    uint64_t position;   /* of the next token to draw */
    int32_t purpose;
    int32_t seq_id;
    int32_t limit;
    int32_t measured;    /* whether entropies are wanted */
    double most_entropy; /* nats */
    double reach;        /* the product of the acceptance of the tokens so far */
    double mean;         /* acceptance of later tokens */
    double rate;         /* tokens a second */
    int32_t n_drafted;   /* tokens of the draft so far */
    int32_t n_costs;
    int32_t is_probe;    /* the first token is drawn anyway */
    int32_t n_edges;
    int32_t most_tokens; /* of the draft, whatever the entropy */
    const double *costs; /* (n_costs): seconds of a round by its length; NULL: not looked at */
    const double *edges; /* (n_edges): of the buckets of entropy */
    const double *acceptance; /* (n_edges + 1) */
    int32_t room;           /* candidates that source_ids and source_weights have room for */
    int32_t *tokens;        /* (limit): what was drawn */
    double *entropies;      /* (limit + 1): of each draw, and of the one that was not made */
    int32_t *source_sizes;  /* (limit): candidates of each draw */
    int32_t *source_ids;    /* all of them, or NULL: not wanted */
    double *source_weights; /* their log-weights, the largest 0 */
    int32_t n_tokens;       /* drawn */
    int32_t n_entropies;
    int32_t n_decoded;      /* of those drawn */
    int32_t n_sources;      /* candidates written */
    int32_t behind;         /* of a head: by how much a token's place in it is lower than in the text */
    int32_t first_output;   /* the number of its row in the first decode */
    int32_t output;         /* the number of its row in the last decode, -1: it had none */
    int32_t state;
} lb_stream;

typedef struct {
    lb_decoder *decoder;
    const uint8_t *is_eog; /* (n_vocab) */
    int32_t n_vocab;
    int32_t n_first; /* entries of the batch that the caller has written */
    int32_t most_decodes;
    int32_t n_decodes; /* that succeeded */
    int32_t code;      /* of the decode that failed, 0: none */
    float *(*get_states)(void *ctx); /* of a head: the states of the rows of logits; NULL: no head */
    int32_t n_state;   /* numbers in a state */
    int32_t (*encode)(void *ctx, lb_batch batch); /* llama_encode */
    const float *features; /* of a head with an encoder: what it makes the states of the first entries of;
                              NULL: the caller has written these */
} lb_loop;

/* Return whether some longer draft gains more tokens than the time it costs is worth. */
static int pays(const lb_stream *s, double acceptance) {
    int32_t k = s->n_drafted;
    double reach = s->reach, gained = 0.0;
    for (int32_t longer = k + 1; longer < s->n_costs; longer++) {
        reach *= acceptance;
        gained += reach;
        if (gained > s->rate * (s->costs[longer] - s->costs[k])) return 1;
        acceptance = s->mean;
    }
    return 0;
}

/* Return whether to draw the next token at this entropy, as ``StopRule.reason`` does in Python. */
static int goes_on(lb_stream *s, double entropy) {
    if (entropy > s->most_entropy || s->n_drafted >= s->most_tokens) return 0;
    if (s->costs) {
        int32_t bucket = 0;
        while (bucket < s->n_edges && s->edges[bucket] <= entropy) bucket++;
        double acceptance = s->acceptance[bucket];
        if (!(s->is_probe && s->n_drafted == 0) && !pays(s, acceptance)) return 0;
        s->reach *= acceptance;
    }
    return 1;
}

/* Draw a stream's next token from its row; return whether it goes on, or why not. */
static int32_t draft_token(lb_stream *s, const uint8_t *is_eog) {
    lb_sampler *sampler = s->sampler;
    lb_row row;
    int32_t n = prepare(sampler, s->row, s->measured, &row);
    if (n == 0) return LB_TO_PYTHON;
    int32_t number = draw(sampler, n, noise_key(s->seed, s->position, (uint64_t)s->purpose));
    if (number < 0 || (s->source_ids && n > s->room - s->n_sources)) return LB_TO_PYTHON;
    if (s->measured) {
        s->entropies[s->n_entropies++] = row.entropy;
        if (!goes_on(s, row.entropy)) return LB_STOPPED;
    }
    if (s->source_ids) {
        float top = sampler->logits[0];
        for (int32_t i = 1; i < n; i++) top = sampler->logits[i] > top ? sampler->logits[i] : top;
        for (int32_t i = 0; i < n; i++) {
            s->source_ids[s->n_sources + i] = sampler->ids[i];
            s->source_weights[s->n_sources + i] = (double)sampler->logits[i] - (double)top;
        }
        s->source_sizes[s->n_tokens] = n;
        s->n_sources += n;
    }
    int32_t token = sampler->ids[number];
    s->tokens[s->n_tokens++] = token;
    s->n_drafted++;
    s->position++;
    if (is_eog[token]) return LB_EOG;
    return s->n_tokens >= s->limit ? LB_FULL_LENGTH : LB_GOES_ON;
}

/* The layout of these structures, to compare with Python's. */
LB_API int32_t lb_loop_layout(void) {
    return (int32_t)(sizeof(lb_stream) * 256 + sizeof(lb_loop));
}

/* Write the states that a head's encoder makes of the features to the first batch; return its code. */
static int encode_first(lb_loop *loop) {
    lb_decoder *d = loop->decoder;
    if (*d->stop) return LB_INTERRUPTED;
    /* Without positions llama.cpp continues those of sequence 0; the encoder reads none. Without outputs it
     * logs a line, and the log takes the GIL. */
    memset(d->batch.logits, 1, (size_t)loop->n_first);
    lb_batch rows = {
        .n_tokens = loop->n_first, .embd = (float *)loop->features, .logits = d->batch.logits
    };
    int code = loop->encode(d->ctx, rows);
    if (code) return code;
    size_t size = sizeof(float) * (size_t)loop->n_state * (size_t)loop->n_first;
    memcpy(d->batch.embd, loop->get_states(d->ctx), size);
    return 0;
}

/* Decode and draw in turns until every stream has ended, one needs Python, or a decode fails.
 *
 * The caller has written the first batch, and for each stream which of its outputs the stream goes on from;
 * with no entries, all streams have their rows. At the end each stream that still goes on has a last token
 * that was drawn and not decoded. */
LB_API void lb_draft(lb_loop *loop, lb_stream *streams, int32_t n_streams) {
    lb_decoder *d = loop->decoder;
    lb_batch *batch = &d->batch;
    batch->n_tokens = loop->n_first;
    loop->n_decodes = loop->code = 0;
    for (int32_t i = 0; i < n_streams; i++) {
        lb_stream *s = streams + i;
        s->n_tokens = s->n_entropies = s->n_decoded = s->n_sources = 0;
        s->output = -1;
        s->state = LB_GOES_ON;
    }
    if (loop->n_first > 0 && loop->features) loop->code = encode_first(loop);
    if (loop->code) return;
    for (int is_first = 1;; is_first = 0) {
        if (batch->n_tokens > 0) {
            loop->code = *d->stop ? LB_INTERRUPTED : d->decode(d->ctx, *batch);
            if (loop->code) return;
            loop->n_decodes++;
            const float *rows = d->logits = d->get_logits(d->ctx);
            const float *states = loop->get_states ? loop->get_states(d->ctx) : NULL;
            int32_t output = 0;
            for (int32_t i = 0; i < n_streams; i++) {
                lb_stream *s = streams + i;
                s->output = -1;
                if (s->state != LB_GOES_ON) continue;
                s->n_decoded += !is_first;
                s->output = is_first ? s->first_output : output++;
                s->row = rows + (int64_t)loop->n_vocab * s->output;
                if (states) s->hidden = states + (int64_t)loop->n_state * s->output;
            }
        }
        int needs_python = 0;
        batch->n_tokens = 0;
        for (int32_t i = 0; i < n_streams; i++) {
            lb_stream *s = streams + i;
            if (s->state != LB_GOES_ON) continue;
            s->state = draft_token(s, loop->is_eog);
            needs_python |= s->state == LB_TO_PYTHON;
            if (s->state != LB_GOES_ON) continue;
            int32_t at = batch->n_tokens++;
            batch->token[at] = s->tokens[s->n_tokens - 1];
            batch->pos[at] = (int32_t)s->position - 1 - s->behind;
            if (loop->get_states) {
                size_t size = sizeof(float) * (size_t)loop->n_state;
                memcpy(batch->embd + (int64_t)loop->n_state * at, s->hidden, size);
            }
            *batch->seq_id[at] = s->seq_id;
            batch->logits[at] = 1;
        }
        if (batch->n_tokens == 0 || needs_python || loop->n_decodes >= loop->most_decodes) return;
    }
}
