/* Bounds of the largest eigenvalue from a block Krylov space: diagonal matrices changed by the rank of one
 * block, so that every question is a Cholesky factorisation of at most 8 x 8. */
#include "tm_spectral_parts.h"

#include <math.h>

#define B TM_SPECTRAL_BLOCK

typedef double small[B][B];

/* Whether the symmetric n x n matrix (lower half) is positive definite; destroys it. */
static int is_positive(small a, int n) {
    for (int j = 0; j < n; j++) {
        double pivot = a[j][j];
        for (int k = 0; k < j; k++) {
            pivot -= a[j][k] * a[j][k];
        }
        if (!(pivot > 0)) {
            return 0;
        }
        pivot = sqrt(pivot);
        a[j][j] = pivot;
        for (int i = j + 1; i < n; i++) {
            double sum = a[i][j];
            for (int k = 0; k < j; k++) {
                sum -= a[i][k] * a[j][k];
            }
            a[i][j] = sum / pivot;
        }
    }
    return 1;
}

/* out = sum over Ritz values from `first` on of weight(theta) f f' (lower half). */
enum weight { OVER_DISTANCE, OVER_THETA_DISTANCE, OVER_THETA, OVER_DISTANCE_SQUARED };
static void weighted(const tm_ritz *ritz, int first, enum weight kind, double t, small out) {
    for (int i = 0; i < ritz->residuals; i++) {
        for (int j = 0; j <= i; j++) {
            out[i][j] = 0;
        }
    }
    for (int k = first; k < ritz->d; k++) {
        const double *f = ritz->f + (size_t)k * B;
        double theta = ritz->theta[k], distance = t - theta, weight = 1 / theta;
        switch (kind) {
        case OVER_DISTANCE:
            weight = 1 / distance;
            break;
        case OVER_THETA_DISTANCE:
            weight = 1 / (theta * distance);
            break;
        case OVER_THETA:
            break;
        case OVER_DISTANCE_SQUARED:
            weight = 1 / (distance * distance);
            break;
        }
        for (int i = 0; i < ritz->residuals; i++) {
            double scaled = weight * f[i];
            for (int j = 0; j <= i; j++) {
                out[i][j] += scaled * f[j];
            }
        }
    }
}

/* t is above all eigenvalues of Theta + Theta^-1/2 F F' Theta^-1/2 (trusted part): by the Schur complement of
 * t - Theta, if I - F' (Theta (t - Theta))^-1 F is positive. */
static int above_nystrom(const tm_ritz *ritz, int first, double t) {
    small a;
    weighted(ritz, first, OVER_THETA_DISTANCE, t, a);
    for (int i = 0; i < ritz->residuals; i++) {
        for (int j = 0; j <= i; j++) {
            a[i][j] = (i == j ? 1.0 : 0.0) - a[i][j];
        }
    }
    return is_positive(a, ritz->residuals);
}

/* t is above all eigenvalues of [[Theta, F], [F', F' Theta^-1 F + rho]] (trusted part). */
static int above_block(const tm_ritz *ritz, int first, double rho, double t) {
    small a, b;
    weighted(ritz, first, OVER_DISTANCE, t, a);
    weighted(ritz, first, OVER_THETA, t, b);
    for (int i = 0; i < ritz->residuals; i++) {
        for (int j = 0; j <= i; j++) {
            a[i][j] = (i == j ? t - rho : 0.0) - a[i][j] - b[i][j];
        }
    }
    return is_positive(a, ritz->residuals);
}

/* h(t) >= quantile: an eigenvalue at t is likely enough, given that the draws' part along its eigenvector
 * must not be too short. h(t) is the largest eigenvalue of X (I + F_t' F_t)^-1 X' with F_t = (t - Theta)^-1 F
 * and X = C' F_t; it is below the quantile if quantile (I + F_t' F_t) - X'X is positive. */
static int is_feasible(const tm_ritz *ritz, double t) {
    small a;
    double x[B][B] = {{0}}; /* [draws][residuals] */
    weighted(ritz, 0, OVER_DISTANCE_SQUARED, t, a);
    for (int k = 0; k < ritz->d; k++) {
        const double *f = ritz->f + (size_t)k * B, *c = ritz->c + (size_t)k * B;
        double weight = 1 / (t - ritz->theta[k]);
        for (int q = 0; q < ritz->draws; q++) {
            double scaled = weight * c[q];
            for (int j = 0; j < ritz->residuals; j++) {
                x[q][j] += scaled * f[j];
            }
        }
    }
    for (int i = 0; i < ritz->residuals; i++) {
        for (int j = 0; j <= i; j++) {
            double square = 0;
            for (int q = 0; q < ritz->draws; q++) {
                square += x[q][i] * x[q][j];
            }
            a[i][j] = ritz->quantile * ((i == j ? 1.0 : 0.0) + a[i][j]) - square;
        }
    }
    return !is_positive(a, ritz->residuals);
}

/* The scan: from `high` down, the distance from `low` shrinking by 1.2 for 96 cells (7 decades); the first
 * cell that ends in a feasible point is scanned again in eighths. h is not monotone: no bisection. */
#define CELLS 96
#define PARTS 8
static double scan(const tm_ritz *ritz, double low, double high) {
    double distance = high - low;
    if (!(distance > 0) || is_feasible(ritz, high)) {
        return high;
    }
    const double ratio = 1 / 1.2, part = pow(ratio, 1.0 / PARTS);
    for (int cell = 0; cell < CELLS; cell++) {
        if (is_feasible(ritz, low + distance * ratio)) {
            for (int i = 0; i < PARTS - 1 && !is_feasible(ritz, low + distance * part); i++) {
                distance *= part;
            }
            break;
        }
        distance *= ratio;
    }
    return low + distance;
}

/* The boundary of a monotone predicate in [from, to], `to` being above: the last two doubles, nearly. */
static void bisect(const tm_ritz *ritz, int first, double rho,
                   int (*above)(const tm_ritz *, int, double, double), double *from, double *to) {
    for (int i = 0; i < 100 && *to - *from > 1e-14 * *to; i++) {
        double middle = *from + (*to - *from) / 2;
        if (above(ritz, first, rho, middle)) {
            *to = middle;
        } else {
            *from = middle;
        }
    }
}

static int above_nystrom_at(const tm_ritz *ritz, int first, double rho, double t) {
    (void)rho;
    return above_nystrom(ritz, first, t);
}

void tm_spectral_bounds(const tm_ritz *ritz, double *low, double *high) {
    const double top = ritz->theta[ritz->d - 1];
    int first = ritz->d - 1; /* the trusted Ritz values are [first, d) */
    double trace = 0, added = 0;
    while (first > 0 && ritz->theta[first - 1] >= ritz->trusted * top) {
        first--;
    }
    if (ritz->residuals == 0) {
        *low = *high = top;
        return;
    }
    for (int k = first; k < ritz->d; k++) {
        double square = 0;
        for (int j = 0; j < ritz->residuals; j++) {
            double f = ritz->f[(size_t)k * B + (size_t)j];
            square += f * f;
        }
        trace += ritz->theta[k] + square / ritz->theta[k];
        added += square / ritz->theta[k];
    }
    double from = top, to = top + added;
    if (to > from) {
        bisect(ritz, first, 0, above_nystrom_at, &from, &to);
    }
    *low = from;

    double rho = ritz->sumsq - trace;
    rho = rho > 0 ? rho : 0;
    double bound = to + rho < ritz->sumsq ? to + rho : ritz->sumsq;
    bound = bound > to ? bound : to;
    if (above_block(ritz, first, rho, bound)) {
        double below = to > rho ? to : rho; /* the block matrix majorises both */
        below = below < bound ? below : bound;
        bisect(ritz, first, rho, above_block, &below, &bound);
    }
    *high = scan(ritz, *low, bound);
}

/* exp(-y) sum of y^j / j! over j >= degrees / 2: the lower tail without cancellation. */
static double chi2_below(double y, int half) {
    double term = exp(-y), sum = 0;
    for (int j = 1; j <= half; j++) {
        term *= y / j;
    }
    for (int j = half + 1; term > 1e-18 * sum && j < 1000; j++) {
        sum += term;
        term *= y / j;
    }
    return sum;
}

double tm_chi2_quantile(double epsilon, int degrees) {
    double low = 0, high = 64; /* far above any quantile below 1/2 */
    for (int i = 0; i < 200; i++) {
        double middle = low + (high - low) / 2;
        if (chi2_below(middle / 2, degrees / 2) < epsilon) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}
