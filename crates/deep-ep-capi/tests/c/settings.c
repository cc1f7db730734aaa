/* What is set and asked besides calls: sizes, bounds, memory, masks. */
#include "example.h"

enum { TOKENS = 4, HIDDEN = 128 };

static void numbers(void) {
  char version[32];
  snprintf(version, sizeof version, "%d.%d.%d", DEEP_EP_VERSION_MAJOR, DEEP_EP_VERSION_MINOR,
           DEEP_EP_VERSION_PATCH);
  CHECK(strcmp(version, deep_ep_version()) == 0);
  CHECK(deep_ep_dtype_size(DEEP_EP_BF16) == 2 && deep_ep_dtype_size(DEEP_EP_FP32) == 4);
  CHECK(deep_ep_dtype_size(DEEP_EP_FP8) == 1 && deep_ep_dtype_size(DEEP_EP_INT64) == 8);
  CHECK(deep_ep_dtype_size(DEEP_EP_NO_TENSOR) == 0 && deep_ep_dtype_size(77) == 0);
}

static void memory_of(deep_ep_buffer_t *buffer) {
  const size_t shape[2] = {3, 8}, wanted = (size_t)1 << 20;
  deep_ep_loan_t *loan;
  deep_ep_tensor_t view;
  void *data;
  CALL(deep_ep_buffer_reserve(buffer, wanted));
  CALL(deep_ep_device_loan(buffer, DEEP_EP_INT32, shape, 2, &loan));
  CALL(deep_ep_loan_tensor(loan, &view));
  CHECK(view.ndim == 2 && view.shape[0] == 3 && view.shape[1] == 8 && view.dtype == DEEP_EP_INT32);
  CALL(deep_ep_loan_write(loan, &data));
  CHECK(data == view.data);
  deep_ep_statistics_t statistics = deep_ep_statistics();
  CALL(deep_ep_buffer_statistics(buffer, &statistics));
  CHECK(statistics.memory_in_use >= 3 * 8 * 4 && statistics.memory_committed >= wanted);
  CALL(deep_ep_loan_free(loan));
  CHECK(deep_ep_buffer_reserve(buffer, SIZE_MAX / 2) != DEEP_EP_OK);
}

/* A low-latency dispatch in which every token goes to every rank that is not masked. */
static void dispatch(deep_ep_buffer_t *buffer, size_t rank, size_t ranks, size_t masked) {
  static uint16_t x[TOKENS * HIDDEN];
  int64_t *topk_idx = (int64_t *)memory(TOKENS * ranks, sizeof *topk_idx);
  for (size_t i = 0; i < TOKENS * ranks; i++) topk_idx[i] = (int64_t)(i % ranks);
  for (size_t i = 0; i < TOKENS * HIDDEN; i++) x[i] = float_to_bf16((float)rank);
  deep_ep_low_latency_dispatch_input_t in = deep_ep_low_latency_dispatch_input();
  in.x = deep_ep_tensor_2d(x, DEEP_EP_BF16, TOKENS, HIDDEN);
  in.topk_idx = deep_ep_tensor_2d(topk_idx, DEEP_EP_INT64, TOKENS, ranks);
  in.num_max_dispatch_tokens_per_rank = TOKENS;
  in.num_experts = ranks;
  int32_t counted = 1000;
  in.cumulative_local_expert_recv_stats = deep_ep_tensor_1d(&counted, DEEP_EP_INT32, 1);
  /* Rows into memory of this program. */
  const size_t rows = ranks * TOKENS;
  uint16_t *received = (uint16_t *)memory(rows * HIDDEN, sizeof *received);
  deep_ep_low_latency_dispatch_output_t out = deep_ep_low_latency_dispatch_output();
  out.x = deep_ep_tensor_3d(received, DEEP_EP_BF16, 1, rows, HIDDEN);
  deep_ep_low_latency_dispatched_t got = deep_ep_low_latency_dispatched();
  CALL(deep_ep_low_latency_dispatch(buffer, &in, &out, &got));
  const size_t from = masked < ranks ? ranks - 1 : ranks;
  CHECK(*(const int32_t *)got.recv_count.data == (int32_t)(TOKENS * from));
  CHECK(counted == 1000 + (int32_t)(TOKENS * from));
  CHECK(got.loan == NULL && got.x.data == received);
  for (size_t row = 0; row < TOKENS * from; row++) {
    for (size_t h = 0; h < HIDDEN; h++) {
      CHECK(received[row * HIDDEN + h] == float_to_bf16((float)(row / TOKENS)));
    }
  }
  CALL(deep_ep_low_latency_dispatched_free(&got));
  free(received);
  free(topk_idx);
}

static void masks(deep_ep_buffer_t *buffer, size_t rank, size_t ranks) {
  int32_t *status = (int32_t *)memory(ranks, sizeof *status);
  dispatch(buffer, rank, ranks, ranks);
  const size_t last = ranks - 1;
  if (ranks > 1) {
    if (rank != last) {
      CALL(deep_ep_low_latency_update_mask_buffer(buffer, last, 1));
      CALL(deep_ep_low_latency_query_mask_buffer(buffer, status, ranks));
      for (size_t r = 0; r < ranks; r++) CHECK(status[r] == (r == last));
      dispatch(buffer, rank, ranks, last);
      CALL(deep_ep_low_latency_clean_mask_buffer(buffer));
      CALL(deep_ep_low_latency_query_mask_buffer(buffer, status, ranks));
      for (size_t r = 0; r < ranks; r++) CHECK(status[r] == 0);
    }
    CHECK(deep_ep_low_latency_update_mask_buffer(buffer, rank, 1) == DEEP_EP_EINVAL);
    CHECK(deep_ep_low_latency_update_mask_buffer(buffer, ranks, 1) == DEEP_EP_EINVAL);
    CHECK(deep_ep_low_latency_query_mask_buffer(buffer, status, ranks + 1) == DEEP_EP_EINVAL);
  }
  free(status);
}

int main(void) {
  deep_ep_communicator_t *communicator;
  deep_ep_buffer_t *buffer;
  size_t rank, ranks, local_rank, bytes;
  const char *engine;
  numbers();
  CALL(deep_ep_communicator_from_env(&communicator));
  CALL(deep_ep_communicator_rank(communicator, &rank));
  CALL(deep_ep_communicator_local_rank(communicator, &local_rank));
  CALL(deep_ep_communicator_size(communicator, &ranks));
  CHECK(rank == local_rank);
  CALL(deep_ep_get_low_latency_rdma_size_hint(TOKENS, HIDDEN, ranks, ranks, &bytes));
  CHECK(bytes >= 2 * ranks * TOKENS * HIDDEN * 2);
  deep_ep_buffer_config_t config = deep_ep_buffer_config();
  config.engine = DEEP_EP_ENGINE_CPU;
  config.low_latency_bytes = bytes;
  config.enable_shrink = 1;
  config.timeout_seconds = 60;
  CALL(deep_ep_buffer_create(communicator, &config, &buffer));
  CALL(deep_ep_buffer_engine(buffer, &engine));
  CHECK(strcmp(engine, "cpu") == 0);
  CALL(deep_ep_buffer_set_num_sms(buffer, 1));
  memory_of(buffer);
  CALL(deep_ep_clean_low_latency_buffer(buffer, TOKENS, HIDDEN, ranks));
  masks(buffer, rank, ranks);
  CALL(deep_ep_communicator_barrier(communicator));
  CALL(deep_ep_buffer_free(buffer));
  CALL(deep_ep_communicator_free(communicator));
  if (rank == 0) printf("settings hold on %d ranks\n", (int)ranks);
  return 0;
}
