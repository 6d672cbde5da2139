/* The compiled core: it measures a row of logits and draws the next token.
 *
 * NumPy and llama.cpp's samplers are right by definition, and this file never draws another token than they.
 * If rounding could change the token (two tokens nearly tied in the race, a cut between equal logits, a sum
 * within rounding of top-p), or if a row has NaN, it returns LB_UNDECIDED, and the caller uses them.
 *
 * Plain C11 and libm. It is compiled without contraction and without -ffast-math, and sums run in a fixed
 * number of lanes, so results do not depend on the instructions that the compiler chooses.
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

/* The build defines LB_CLONES if a function can have several variants. One is chosen at run time. */
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

/* GCC would unroll such a short loop before it vectorises, and then it could not vectorise. */
#if defined(__GNUC__) && !defined(__clang__)
#define EACH_LANE(l) _Pragma("GCC unroll 1") for (int l = 0; l < LANES; l++)
#else
#define EACH_LANE(l) for (int l = 0; l < LANES; l++)
#endif

/* The measures of a row before any sampling setting, in nats. */
typedef struct {
    double logsumexp;
    double entropy;
    float top;    /* the largest logit */
    int32_t best; /* its token, the smallest id among equals; -1: NaN, or no finite maximum */
} lb_row;

/* Settings, and working memory, which one call at a time may use. */
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
    float *maxima;    /* (n_vocab): the maxima of blocks, then a copy to select from */
    uint64_t *keys;   /* (2 n_vocab): candidates to sort */
    int32_t *ids;     /* (n_vocab): the candidates */
    float *logits;    /* (n_vocab): the candidates' logits / temperature; before that, working space */
    double *weights;  /* (n_vocab): their log-weights, the largest 0 */
} lb_sampler;

/* The result of a call on a row. */
typedef struct {
    lb_row row;
    double logprob;  /* of the token under the row, nats */
    int32_t token;   /* -1: undecided */
    int32_t n;       /* candidates found; 0: undecided */
} lb_choice;

/* -- measuring ------------------------------------------------------------------------------------- */

/* exp(x) of LANES numbers in [-87, 0], with an error of 1e-7: 2^n times a polynomial in the rest. */
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

/* Sum exp(x - top) and exp(x - top) * (x - top), from which log-sum-exp and entropy are computed. */
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

/* -- candidates: those that llama.cpp's samplers keep, in the same order ------------------------------- */

/* A key that is ordered like (logit, smaller id): for finite logits and -inf. */
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

/* Collect the keys of all logits >= least; ``maxima`` has the maxima of blocks of ``size``, or is NULL. */
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
 * ``maxima`` has the maxima of blocks of ``size`` and is overwritten. Returns the number of keys; 0 if the
 * cut is between equal logits, because llama.cpp's choice among these is not specified. */
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

/* Sum e^(logit - top) in llama.cpp's order and 32-bit arithmetic. Python checks that both expf agree. */
static float softmax_total(const float *x, int32_t n, float top) {
    float total = 0.0f;
    for (int32_t i = 0; i < n; i++) total += expf(x[i] - top);
    return total;
}

/* Apply top-p to the sorted candidates, whose weights sum to ``total``, with llama.cpp's arithmetic.
 * Returns the number of kept candidates; 0: undecided; -1: the n candidates do not reach p. */
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

/* The logit below which min-p drops a token; ``*slack``: how much another rounding of logf changes it. */
static float min_p_logit(float top, float min_p, float *slack) {
    float log_p = logf(min_p), least = top + log_p;
    *slack = FLT_EPSILON * (fabsf(log_p) + fabsf(least)) + FLT_MIN;
    return least;
}

/* Keep what top-k, top-p and min-p leave, in descending order, with ids in s->ids. Returns their number;
 * 0: undecided. */
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
        /* Usually a few tokens have the probability p: try the 256 largest, then all. */
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

/* Keep what min-p leaves, in the order of ids; returns as ``keep_sorted``. */
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
 * ``top`` is the largest logit, ``maxima`` has the maxima of blocks. Returns the number; 0: undecided. */
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

/* The race: the candidate with the smallest -log(u) / w, that is the largest log(u) / w, wins. */
typedef struct {
    double least;
    int32_t winner; /* the candidate's number */
    int is_close;   /* another candidate is so near that rounding could change the winner */
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

/* Skip blocks of LANES candidates that cannot beat ``least``, by bounds of -log(u) and of w, from number i
 * on. Returns where the first other block begins, or the number after the last full block. */
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

/* Draw one of the n candidates; return its number, or -1: undecided. */
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

/* Find the candidates of a row; measure it too if asked. Returns the number of candidates; 0: undecided. */
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

/* llama.cpp's llama_batch; Python has checked that the fields agree. */
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

/* The layout of the structures, which Python compares with its own; 0 if 32-bit arithmetic is not exact. */
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
 * ``to_piece`` is llama_token_to_piece. Returns the number of bytes needed. If there is too little room, the
 * rest is not written. */
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
