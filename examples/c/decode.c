/*
 * Decoding: low-latency dispatch in FP8 and combine without a copy, with other work between the halves.
 *
 *   deep-ep launch -n 4 ./decode
 *
 * Expert e multiplies by e + 1. Every row and every sum is compared with what this rank computes alone.
 */
#include "example.h"

enum { MAX_TOKENS = 16, HIDDEN = 512, TOP_K = 2, LOCAL_EXPERTS = 2, ROUNDS = 4 };

/* This rank's tokens. */
typedef struct batch {
  size_t tokens;
  uint16_t x[MAX_TOKENS * HIDDEN]; /* bf16 */
  int64_t topk_idx[MAX_TOKENS * TOP_K];
  float topk_weights[MAX_TOKENS * TOP_K];
} batch;

/* Values that FP8 holds exactly: a power of two, of at most three halvings. */
static float value_of(size_t rank, size_t token, size_t round, size_t h) {
  uint64_t state = ((rank * 131 + token) * 31 + round) * 1009 + h;
  uint64_t bits = random_bits(&state);
  float value = ldexpf(1.0f, -(int)(bits % 4));
  if (h % 128 == 0) value = 1; /* the largest of its block */
  return bits & 16 ? -value : value;
}

static void make_batch(batch *it, size_t rank, size_t round, size_t experts) {
  uint64_t state = rank * 1000 + round;
  it->tokens = (size_t)(random_bits(&state) % (MAX_TOKENS + 1)); /* none is allowed */
  for (size_t t = 0; t < it->tokens; t++) {
    for (size_t h = 0; h < HIDDEN; h++) it->x[t * HIDDEN + h] = float_to_bf16(value_of(rank, t, round, h));
    random_choices(&state, it->topk_idx + t * TOP_K, TOP_K, experts);
    for (size_t k = 0; k < TOP_K; k++) it->topk_weights[t * TOP_K + k] = 0.25f * (float)(k + 1);
  }
}

/* What a program does while rows are on their way. */
static double other_work(void) {
  double sum = 0;
  for (int i = 1; i < 10000; i++) sum += 1.0 / i;
  return sum;
}

/* The experts read FP8 rows and write bf16 rows to `out` [E/R, R*M, H]; rows are compared with `value_of`. */
static void run_experts(const deep_ep_low_latency_dispatched_t *got, uint16_t *out, size_t rank, size_t ranks,
                        size_t round) {
  deep_ep_low_latency_handle_tensors_t handle = deep_ep_low_latency_handle_tensors();
  CALL(deep_ep_low_latency_handle_get_tensors(got->handle, &handle));
  const size_t rows = ranks * MAX_TOKENS, *stride = got->scales.strides;
  const uint8_t *codes = (const uint8_t *)got->x.data;
  const float *scales = (const float *)got->scales.data;
  const int32_t *source = (const int32_t *)handle.src_info.data;
  const int64_t *ranges = (const int64_t *)handle.layout_range.data;
  for (size_t e = 0; e < LOCAL_EXPERTS; e++) {
    for (size_t from = 0; from < ranks; from++) {
      const uint64_t range = (uint64_t)ranges[e * ranks + from];
      const size_t begin = (size_t)(range >> 32), count = (size_t)(range & 0xffffffff);
      for (size_t row = begin; row < begin + count; row++) {
        for (size_t h = 0; h < HIDDEN; h++) {
          const size_t at = (e * rows + row) * HIDDEN + h;
          const float scale = scales[e * stride[0] + row * stride[1] + h / 128 * stride[2]];
          const float x = bf16_to_float(float_to_bf16(fp8_to_float(codes[at]) * scale));
          CHECK(x == value_of(from, (size_t)source[e * rows + row], round, h));
          out[at] = float_to_bf16(x * (float)(rank * LOCAL_EXPERTS + e + 1));
        }
      }
    }
  }
}

static void compare(const batch *in, const uint16_t *sums, size_t rank, size_t round) {
  for (size_t t = 0; t < in->tokens; t++) {
    for (size_t h = 0; h < HIDDEN; h++) {
      float sum = 0, size = 0;
      for (size_t k = 0; k < TOP_K; k++) {
        const float expert = (float)(in->topk_idx[t * TOP_K + k] + 1);
        const float part = in->topk_weights[t * TOP_K + k] * expert * value_of(rank, t, round, h);
        sum += part;
        size += fabsf(part);
      }
      CHECK(fabsf(bf16_to_float(sums[t * HIDDEN + h]) - sum) <= size / 128);
    }
  }
}

static void decode(deep_ep_buffer_t *buffer, size_t rank, size_t ranks, size_t round) {
  const size_t experts = LOCAL_EXPERTS * ranks;
  static batch in;
  static uint16_t sums[MAX_TOKENS * HIDDEN];
  make_batch(&in, rank, round, experts);

  deep_ep_low_latency_dispatch_input_t rows = deep_ep_low_latency_dispatch_input();
  rows.x = deep_ep_tensor_2d(in.x, DEEP_EP_BF16, in.tokens, HIDDEN);
  rows.topk_idx = deep_ep_tensor_2d(in.topk_idx, DEEP_EP_INT64, in.tokens, TOP_K);
  rows.num_max_dispatch_tokens_per_rank = MAX_TOKENS;
  rows.num_experts = experts;
  rows.row_format = DEEP_EP_ROWS_FP8;
  deep_ep_pending_t *pending;
  CALL(deep_ep_low_latency_dispatch_begin(buffer, &rows, &pending));
  CHECK(other_work() > 0);
  deep_ep_low_latency_dispatched_t got = deep_ep_low_latency_dispatched();
  CALL(deep_ep_low_latency_dispatch_finish(pending, NULL, &got)); /* the hook */
  CALL(deep_ep_pending_free(pending));

  deep_ep_loan_t *loan;
  void *out;
  CALL(deep_ep_get_next_low_latency_combine_buffer(buffer, got.handle, HIDDEN, &loan));
  CALL(deep_ep_loan_write(loan, &out));
  run_experts(&got, (uint16_t *)out, rank, ranks, round);

  deep_ep_low_latency_combine_input_t back = deep_ep_low_latency_combine_input();
  back.loan = loan;
  back.topk_idx = rows.topk_idx;
  back.topk_weights = deep_ep_tensor_2d(in.topk_weights, DEEP_EP_FP32, in.tokens, TOP_K);
  back.handle = got.handle;
  CALL(deep_ep_low_latency_combine_begin(buffer, &back, &pending));
  CHECK(other_work() > 0);
  deep_ep_tensor_t result = deep_ep_tensor_2d(sums, DEEP_EP_BF16, in.tokens, HIDDEN);
  CALL(deep_ep_low_latency_combine_finish(pending, &result));
  CALL(deep_ep_pending_free(pending));
  compare(&in, sums, rank, round);
  CALL(deep_ep_loan_free(loan));
  CALL(deep_ep_low_latency_dispatched_free(&got));
}

int main(void) {
  deep_ep_communicator_t *communicator;
  deep_ep_buffer_t *buffer;
  size_t rank, ranks;
  CALL(deep_ep_communicator_from_env(&communicator));
  CALL(deep_ep_communicator_rank(communicator, &rank));
  CALL(deep_ep_communicator_size(communicator, &ranks));
  deep_ep_buffer_config_t config = deep_ep_buffer_config();
  config.low_latency.num_max_dispatch_tokens_per_rank = MAX_TOKENS;
  config.low_latency.hidden = HIDDEN;
  config.low_latency.num_experts = LOCAL_EXPERTS * ranks;
  CALL(deep_ep_buffer_create(communicator, &config, &buffer));
  for (size_t round = 0; round < ROUNDS; round++) decode(buffer, rank, ranks, round);
  CALL(deep_ep_buffer_free(buffer));
  CALL(deep_ep_communicator_free(communicator));
  if (rank == 0) printf("%d rounds agree on %d ranks\n", (int)ROUNDS, (int)ranks);
  return 0;
}
