/* What the examples share: errors, random numbers that are the same on every rank, bf16. */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include <deep_ep.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ends the program when a call fails. The launcher then ends the other ranks. */
#define CALL(call)                                                                          \
  do {                                                                                      \
    deep_ep_status_t status_ = (call);                                                      \
    if (status_ != DEEP_EP_OK) {                                                            \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, deep_ep_status_name(status_), \
              deep_ep_last_error());                                                        \
      exit(1);                                                                              \
    }                                                                                       \
  } while (0)

/* Ends the program when something does not hold. */
#define CHECK(holds)                                                                \
  do {                                                                              \
    if (!(holds)) {                                                                 \
      fprintf(stderr, "%s:%d: this does not hold: %s\n", __FILE__, __LINE__, #holds); \
      exit(1);                                                                      \
    }                                                                               \
  } while (0)

/* `n` values of `size` bytes, zeros. */
static inline void *memory(size_t n, size_t size) {
  void *made = calloc(n ? n : 1, size);
  CHECK(made != NULL);
  return made;
}

/* SplitMix64 (Steele, Lea, Flood, 2014). */
static inline uint64_t random_bits(uint64_t *state) {
  uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

/* Between -1 and 1. */
static inline float random_float(uint64_t *state) {
  return (float)(random_bits(state) >> 40) / 8388608.0f - 1.0f;
}

/* `k` different experts of `experts`. */
static inline void random_choices(uint64_t *state, int64_t *choices, size_t k, size_t experts) {
  for (size_t i = 0; i < k; i++) {
    size_t before;
    do {
      choices[i] = (int64_t)(random_bits(state) % experts);
      for (before = 0; before < i && choices[before] != choices[i]; before++) {
      }
    } while (before < i);
  }
}

static inline float bf16_to_float(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, sizeof value);
  return value;
}

/* Nearest, ties to even; not for NaN. */
static inline uint16_t float_to_bf16(float value) {
  uint32_t word;
  memcpy(&word, &value, sizeof word);
  return (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

/* The number that an FP8 E4M3 code stands for. */
static inline float fp8_to_float(uint8_t code) {
  int exponent = (code >> 3) & 15, mantissa = code & 7;
  float value = exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
  return code & 0x80 ? -value : value;
}

#endif
