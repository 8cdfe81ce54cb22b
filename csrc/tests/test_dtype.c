#include "runner.h"

void test_dtype(void) {
    static const struct {
        const char *name;
        tm_dtype dtype;
    } names[] = {{"bf16", TM_BF16},
                 {"f32", TM_F32},
                 {"half", TM_F16},
                 {"e4m3fn", TM_F8E4M3FN},
                 {"fp8_e5m2", TM_F8E5M2},
                 {"f8e3m4", TM_F8E3M4},
                 {"e8m0fnu", TM_F8E8M0FNU},
                 {"u64", TM_U64},
                 {"float8_", TM_DTYPE_COUNT},
                 {"", TM_DTYPE_COUNT},
                 {"complex64", TM_DTYPE_COUNT}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        CHECK(tm_dtype_from_name(names[i].name) == names[i].dtype, "%s", names[i].name);
    }
    for (int i = 0; i < TM_DTYPE_COUNT; i++) {
        CHECK((int)tm_dtype_from_name(tm_dtype_name((tm_dtype)i)) == i, "%s", tm_dtype_name((tm_dtype)i));
        CHECK(tm_dtype_size((tm_dtype)i) >= 1 && tm_dtype_size((tm_dtype)i) <= 8, "dtype %d", i);
    }
    CHECK(tm_dtype_size(TM_DTYPE_COUNT) == 0, "no size behind the last");

    tm_error error = {""};
    tm_view views[] = {
        {.n = 1, .dtype = TM_F32}, {.n = -1, .dtype = TM_F32}, {.n = 0, .dtype = TM_DTYPE_COUNT}};
    tm_status expected[] = {TM_ERR_VALUE, TM_ERR_VALUE, TM_ERR_DTYPE};
    for (int i = 0; i < 3; i++) {
        tm_stats stats;
        double total;
        tm_nonfinite found;
        CHECK(tm_tensor_stats(&views[i], 1, 1, &stats, &error) == expected[i], "view %d", i);
        CHECK(tm_multi_norm(&views[i], 1, TM_NORM_2, 1, &total, NULL, &error) == expected[i], "view %d", i);
        CHECK(tm_scan_nonfinite(&views[i], 1, 1, &found, &error) == expected[i], "view %d", i);
        CHECK(error.text[0] != '\0', "view %d", i);
    }
}
