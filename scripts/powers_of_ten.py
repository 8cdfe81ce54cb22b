"""Prints csrc/core/tm_powers.h: the powers of ten that shortest decimals are made with.

python scripts/powers_of_ten.py > csrc/core/tm_powers.h
"""

LOWEST, HIGHEST = -292, 324


def power(k: int) -> int:
    """10^k, scaled by a power of two into [2^127, 2^128) and rounded up."""
    if k >= 0:
        shift = (10**k).bit_length() - 128
        return 10**k << -shift if shift <= 0 else -(-(10**k) >> shift)
    shift = 127 + (10**-k).bit_length()
    value = -(-(1 << shift) // 10**-k)
    return value if value < 1 << 128 else -(-(1 << shift - 1) // 10**-k)


def main() -> None:
    print(
        "/* 10^k for k from TM_POWERS_LOWEST on, times the power of two that brings it into [2^127, 2^128), rounded"
    )
    print(" * up: the upper and the lower 64 bits. Written by scripts/powers_of_ten.py. */")
    print("#ifndef TM_POWERS_H")
    print("#define TM_POWERS_H\n")
    print("#include <stdint.h>\n")
    print(f"#define TM_POWERS_LOWEST ({LOWEST})")
    print(f"#define TM_POWERS_HIGHEST {HIGHEST}\n")
    print("/* clang-format off */")
    print("static const uint64_t tm_powers[TM_POWERS_HIGHEST - TM_POWERS_LOWEST + 1][2] = {")
    for k in range(LOWEST, HIGHEST + 1):
        value = power(k)
        assert 1 << 127 <= value < 1 << 128
        print(f"    {{0x{value >> 64:016x}, 0x{value & (1 << 64) - 1:016x}}},")
    print("};")
    print("/* clang-format on */\n")
    print("#endif")


if __name__ == "__main__":
    main()
