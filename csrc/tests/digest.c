#include "digest.h"

#include "runner.h"

#include <math.h>

void digest_word(uint64_t *digest, uint64_t word) { /* FNV-1a by words, high bits brought down */
    *digest = (*digest ^ word) * UINT64_C(0x100000001b3);
    *digest ^= *digest >> 29;
}

void digest_bytes(uint64_t *digest, const void *data, size_t bytes) {
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) {
        digest_word(digest, p[i]);
    }
}

void digest_integers(uint64_t *digest, const int64_t *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        digest_word(digest, (uint64_t)values[i]);
    }
}

void digest_doubles(uint64_t *digest, const double *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        uint64_t bits = UINT64_C(0x7ff8000000000000);
        if (!isnan(values[i])) {
            memcpy(&bits, &values[i], sizeof bits);
        }
        digest_word(digest, bits);
    }
}

void digest_floats(uint64_t *digest, const float *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        double value = (double)values[i];
        digest_doubles(digest, &value, 1);
    }
}

void check_digest(const char *name, uint64_t digest, uint64_t expected) {
    CHECK(digest == expected, "%s gives 0x%016llx, not 0x%016llx, tier %s", name, (unsigned long long)digest,
          (unsigned long long)expected, tm_tier_name(tm_dispatch_describe()->tier));
}
