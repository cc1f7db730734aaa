/*
 * The call sites that need no buffer: deep_ep_all_to_all(input, output, size, FP8) and the like. Values are
 * compared with what every rank computes for itself.
 */
#include "example.h"

enum { HIDDEN = 40, BATCH = 5 };

static size_t rank, ranks;

/* Value `i` of the block that `from` sends to `to`. */
static float value_of(size_t from, size_t to, size_t i) {
  uint64_t state = (from * 64 + to) * 100000 + i;
  return 3.0f * random_float(&state);
}

/* Exchanges blocks of `n` values as `dtype`. */
static void exchange(size_t n, deep_ep_dtype_t dtype) {
  const size_t size = n * ranks;
  float *input = (float *)memory(size, sizeof *input), *output = (float *)memory(size, sizeof *output);
  for (size_t to = 0; to < ranks; to++) {
    for (size_t i = 0; i < n; i++) input[to * n + i] = value_of(rank, to, i);
  }
  CALL(deep_ep_all_to_all(input, output, size, dtype));
  for (size_t from = 0; from < ranks; from++) {
    for (size_t i = 0; i < n; i++) {
      const float sent = value_of(from, rank, i), found = output[from * n + i];
      if (dtype == DEEP_EP_FP32) CHECK(found == sent);
      if (dtype == DEEP_EP_BF16) CHECK(found == bf16_to_float(float_to_bf16(sent)));
      if (dtype == DEEP_EP_FP8) {
        /* Half a step of three bits of mantissa, or of the smallest number that the scale allows. */
        float most = 0;
        for (size_t j = i / 128 * 128; j < n && j < i / 128 * 128 + 128; j++) {
          most = fmaxf(most, fabsf(value_of(from, rank, j)));
        }
        CHECK(fabsf(found - sent) <= fmaxf(fabsf(sent) / 16, most / 448 / 1024) * 1.001f);
        if (fabsf(sent) == most) CHECK(fabsf(found - sent) <= most * 1e-6f);
      }
    }
  }
  free(input);
  free(output);
}

static void low_latency_exchange(size_t batch_size) {
  const size_t n = batch_size * HIDDEN;
  float *query = (float *)memory(n * ranks, sizeof *query), *result = (float *)memory(n * ranks, sizeof *result);
  for (size_t to = 0; to < ranks; to++) {
    for (size_t i = 0; i < n; i++) query[to * n + i] = value_of(rank, to, i);
  }
  CALL(deep_ep_low_latency_all_to_all(query, result, batch_size));
  for (size_t from = 0; from < ranks; from++) {
    for (size_t i = 0; i < n; i++) CHECK(result[from * n + i] == value_of(from, rank, i));
  }
  free(query);
  free(result);
}

/* The three call sites as people write them. */
static void as_written(void) {
  const size_t size = 256 * ranks, batch_size = BATCH;
  float *input = (float *)memory(size, sizeof *input), *output = (float *)memory(size, sizeof *output);
  float *query = (float *)memory(ranks * batch_size * HIDDEN, sizeof *query);
  float *result = (float *)memory(ranks * batch_size * HIDDEN, sizeof *result);
  query[0] = input[0] = 1.0f;
  deep_ep_set_sm_limit(32);
  deep_ep_all_to_all(input, output, size, FP8);
  deep_ep_low_latency_all_to_all(query, result, batch_size);
  /* Only the first block has anything in it, and it goes to rank 0. */
  for (size_t from = 0; from < ranks; from++) {
    const float expected = rank == 0 ? 1.0f : 0.0f;
    CHECK(fabsf(output[from * 256] - expected) < 1e-6f);
    CHECK(result[from * batch_size * HIDDEN] == expected);
  }
  free(input);
  free(output);
  free(query);
  free(result);
}

static void errors(void) {
  float a[64] = {0}, b[64];
  if (ranks > 1) CHECK(deep_ep_all_to_all(a, b, ranks + 1, DEEP_EP_FP32) == DEEP_EP_EINVAL);
  CHECK(deep_ep_all_to_all(a, a, ranks, DEEP_EP_FP32) == DEEP_EP_EINVAL);
  CHECK(deep_ep_all_to_all(NULL, b, ranks, DEEP_EP_FP32) == DEEP_EP_EINVAL);
  CHECK(deep_ep_all_to_all(a, NULL, ranks, DEEP_EP_FP32) == DEEP_EP_EINVAL);
  CHECK(deep_ep_all_to_all(a, b, ranks, DEEP_EP_INT64) == DEEP_EP_EINVAL);
  CHECK(deep_ep_low_latency_all_to_all(a, b, BATCH + 1) == DEEP_EP_EINVAL);
  CHECK(deep_ep_set_sm_limit(0) == DEEP_EP_EINVAL);
  CHECK(deep_ep_init(NULL) == DEEP_EP_EINVAL);
  /* One rank alone does not keep the others waiting. */
  const deep_ep_status_t status = deep_ep_all_to_all(rank == 0 ? NULL : a, b, ranks, DEEP_EP_FP32);
  CHECK(status == (rank == 0 ? DEEP_EP_EINVAL : DEEP_EP_EPEER_REJECTED));
}

int main(void) {
  CALL(deep_ep_set_sm_limit(2)); /* before there is a buffer */
  deep_ep_buffer_t *buffer;
  /* A buffer made at first use has no room for low-latency calls. */
  float nothing[1];
  CHECK(deep_ep_low_latency_all_to_all(nothing, nothing, 1) == DEEP_EP_EINVAL);
  CALL(deep_ep_default_buffer(&buffer));
  CALL(deep_ep_buffer_rank(buffer, &rank));
  CALL(deep_ep_buffer_num_ranks(buffer, &ranks));
  exchange(1, DEEP_EP_FP8);
  CALL(deep_ep_buffer_barrier(buffer));
  CALL(deep_ep_finalize());
  CALL(deep_ep_finalize());
  CHECK(deep_ep_buffer_barrier(buffer) == DEEP_EP_EINVAL);

  deep_ep_buffer_config_t config = deep_ep_buffer_config();
  config.low_latency.num_max_dispatch_tokens_per_rank = BATCH;
  config.low_latency.hidden = HIDDEN;
  config.low_latency.num_experts = ranks;
  CALL(deep_ep_init(&config));
  const size_t sizes[] = {0, 1, 3, 127, 128, 129, 1000};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    exchange(sizes[i], DEEP_EP_FP8);
    exchange(sizes[i], DEEP_EP_BF16);
    exchange(sizes[i], DEEP_EP_FP32);
  }
  for (size_t batch = 0; batch <= BATCH; batch++) low_latency_exchange(batch);
  as_written();
  errors();
  as_written();
  CALL(deep_ep_default_buffer(&buffer));
  CALL(deep_ep_buffer_barrier(buffer));
  CALL(deep_ep_finalize());
  if (rank == 0) printf("exchanges agree on %d ranks\n", (int)ranks);
  return 0;
}
