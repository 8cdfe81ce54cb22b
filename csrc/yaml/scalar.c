/* Resolves plain scalars with small hand-written recognisers, one a rule. Contract: scalar.h. Knows no
 * Python. */
#include "scalar.h"

#include <stdbool.h>
#include <string.h>

typedef struct cursor {
    const char *at;
    const char *end;
} cursor;

static bool digit(char c) {
    return c >= '0' && c <= '9';
}

static bool done(const cursor *c) {
    return c->at == c->end;
}

static bool see(const cursor *c, char wanted) {
    return c->at < c->end && *c->at == wanted;
}

static bool see_digit(const cursor *c) {
    return c->at < c->end && digit(*c->at);
}

static bool eat(cursor *c, char wanted) {
    if (!see(c, wanted)) {
        return false;
    }
    c->at++;
    return true;
}

static bool eat_sign(cursor *c) {
    return eat(c, '-') || eat(c, '+');
}

/* Skips characters of `set` and underscores; returns how many of `set` there were. */
static size_t eat_run(cursor *c, const char *set) {
    size_t found = 0;
    while (c->at < c->end && *c->at != '\0' && (*c->at == '_' || strchr(set, *c->at) != NULL)) {
        found += *c->at != '_';
        c->at++;
    }
    return found;
}

static size_t eat_digits(cursor *c) {
    return eat_run(c, "0123456789");
}

/* (:[0-5]?[0-9])+ */
static bool eat_sixties(cursor *c) {
    bool any = false;
    while (see(c, ':')) {
        cursor next = {c->at + 1, c->end};
        if (!see_digit(&next)) {
            return false;
        }
        char first = *next.at++;
        if (see_digit(&next)) {
            if (first > '5') {
                return false;
            }
            next.at++;
        }
        *c = next;
        any = true;
    }
    return any;
}

/* [eE] sign digits; with `lenient` the sign may be missing. Nothing there is fine too. */
static bool eat_exponent(cursor *c, bool lenient) {
    if (!eat(c, 'e') && !eat(c, 'E')) {
        return true;
    }
    if (!eat_sign(c) && !lenient) {
        return false;
    }
    size_t found = 0;
    for (; see_digit(c); c->at++) {
        found++;
    }
    return found > 0;
}

static tm_scalar_kind resolve_int(cursor c) {
    eat_sign(&c);
    if (!see_digit(&c)) {
        return TM_SCALAR_TEXT;
    }
    if (eat(&c, '0')) {
        if (done(&c)) {
            return TM_SCALAR_INT10;
        }
        if (eat(&c, 'b')) {
            return eat_run(&c, "01") > 0 && done(&c) ? TM_SCALAR_INT2 : TM_SCALAR_TEXT;
        }
        if (eat(&c, 'x')) {
            return eat_run(&c, "0123456789abcdefABCDEF") > 0 && done(&c) ? TM_SCALAR_INT16 : TM_SCALAR_TEXT;
        }
        eat_run(&c, "01234567");
        return done(&c) ? TM_SCALAR_INT8 : TM_SCALAR_TEXT;
    }
    eat_digits(&c);
    if (done(&c)) {
        return TM_SCALAR_INT10;
    }
    return eat_sixties(&c) && done(&c) ? TM_SCALAR_INT60 : TM_SCALAR_TEXT;
}

static tm_scalar_kind resolve_float(cursor c) {
    bool minus = see(&c, '-');
    bool sign = eat_sign(&c);
    size_t left = (size_t)(c.end - c.at);
    if (left == 4 && (!memcmp(c.at, ".inf", 4) || !memcmp(c.at, ".Inf", 4) || !memcmp(c.at, ".INF", 4))) {
        return minus ? TM_SCALAR_NEGATIVE_INF : TM_SCALAR_INF;
    }
    if (left == 4 && !sign &&
        (!memcmp(c.at, ".nan", 4) || !memcmp(c.at, ".NaN", 4) || !memcmp(c.at, ".NAN", 4))) {
        return TM_SCALAR_NAN;
    }
    if (see_digit(&c)) {
        eat_digits(&c);
        bool sixty = eat_sixties(&c);
        if (!eat(&c, '.')) {
            return TM_SCALAR_TEXT;
        }
        eat_digits(&c);
        if (sixty) {
            return done(&c) ? TM_SCALAR_FLOAT60 : TM_SCALAR_TEXT;
        }
    } else if (!sign && eat(&c, '.') && see_digit(&c)) { /* PyYAML has no sign before a leading point */
        eat_digits(&c);
    } else {
        return TM_SCALAR_TEXT;
    }
    return eat_exponent(&c, false) && done(&c) ? TM_SCALAR_FLOAT10 : TM_SCALAR_TEXT;
}

typedef struct word {
    const char *text;
    tm_scalar_kind kind;
} word;

static const word words[] = {
    {"", TM_SCALAR_NULL},       {"~", TM_SCALAR_NULL},      {"null", TM_SCALAR_NULL},
    {"Null", TM_SCALAR_NULL},   {"NULL", TM_SCALAR_NULL},   {"true", TM_SCALAR_TRUE},
    {"True", TM_SCALAR_TRUE},   {"TRUE", TM_SCALAR_TRUE},   {"yes", TM_SCALAR_TRUE},
    {"Yes", TM_SCALAR_TRUE},    {"YES", TM_SCALAR_TRUE},    {"on", TM_SCALAR_TRUE},
    {"On", TM_SCALAR_TRUE},     {"ON", TM_SCALAR_TRUE},     {"false", TM_SCALAR_FALSE},
    {"False", TM_SCALAR_FALSE}, {"FALSE", TM_SCALAR_FALSE}, {"no", TM_SCALAR_FALSE},
    {"No", TM_SCALAR_FALSE},    {"NO", TM_SCALAR_FALSE},    {"off", TM_SCALAR_FALSE},
    {"Off", TM_SCALAR_FALSE},   {"OFF", TM_SCALAR_FALSE},
};

tm_scalar_kind tm_scalar_resolve(const char *text, size_t length) {
    if (length <= 5) {
        for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
            if (strlen(words[i].text) == length && memcmp(words[i].text, text, length) == 0) {
                return words[i].kind;
            }
        }
    }
    cursor all = {text, text + length};
    tm_scalar_kind kind = resolve_int(all);
    return kind != TM_SCALAR_TEXT ? kind : resolve_float(all);
}

int tm_scalar_is_number(const char *text, size_t length) {
    cursor c = {text, text + length};
    eat_sign(&c);
    size_t found = see(&c, '_') ? 0 : eat_digits(&c);
    if (eat(&c, '.')) {
        found += found == 0 && see(&c, '_') ? 0 : eat_digits(&c);
    }
    return found > 0 && eat_exponent(&c, true) && done(&c);
}
