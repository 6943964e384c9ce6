/* SPDX-License-Identifier: MIT */
/* IEEE half precision as the kernels make it: rounded to the nearest even, beyond the range +-65504.
 * For C and C++. */
#ifndef F16_H
#define F16_H

#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C"
#endif
    float
    krn_f16_to_f32(uint16_t h);

static inline uint16_t f16_of(float f)
{
    uint32_t u, a;
    memcpy(&u, &f, 4);
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000u);
    a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return 0x7fff;
    if (a >= 0x477fe000u)
        return (uint16_t)(sign | 0x7bffu);
    if (a < 0x38800000u) { /* below 2^-14: a whole number of 2^-24, at the end of a float's fraction */
        float x;
        memcpy(&x, &a, 4);
        x = x * 16777216.0f + 8388608.0f;
        memcpy(&a, &x, 4);
        return (uint16_t)(sign | (a & 0x7fffffu));
    }
    a += 0xfffu + (a >> 13 & 1);
    return (uint16_t)(sign | ((a >> 13) - (112u << 10)));
}

static inline float f16_to(uint16_t h)
{
    return krn_f16_to_f32(h);
}

#endif
